"""Train a small GPT, resume it bit for bit, damage a copy, kill and stop and fork a run, and measure.

`python examples/demo.py` takes less than two minutes, and one gigabyte of disk for that time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from _gpt import Config, build, train_step
from _measure import CALLS, measure, synthetic
from _telling import fingerprint, run, say, title
from _text import python_text
from demo_run import survive

import shardstore

SHOWN = 5  # losses that are printed of each part of the training


# ---------------------------------------------------------------------------------------- the training


def new_state(config: Config, seed: int) -> dict[str, Any]:
    """Everything that the next step depends on. The objects themselves stand in it."""
    model, optimizer, scheduler = build(config, seed)
    return {
        "model": model, "optimizer": optimizer, "scheduler": scheduler,
        "rng": torch.get_rng_state(), "step": 0, "losses": [], "config": asdict(config),
    }  # fmt: skip


def train(state: dict[str, Any], until: int, text: torch.Tensor) -> None:
    """Train from the step where the state is, with the random numbers that torch's generator gives next."""
    while state["step"] < until:
        state["losses"].append(train_step(state["model"], state["optimizer"], state["scheduler"], text))
        state["step"] += 1
    state["rng"] = torch.get_rng_state()


def resume(url: str, until: int) -> None:
    """What the fresh process does: load, train on, and answer in JSON."""
    config = Config(**shardstore.load(url, only="config")["config"])
    state = new_state(config, seed=2)
    before = fingerprint(state["model"])
    state = shardstore.load(url, into=state)
    torch.set_rng_state(state["rng"])
    begin = state["step"]
    train(state, until, python_text(config.text_bytes))
    losses = [loss.hex() for loss in state["losses"][begin:]]
    print(json.dumps({"before": before, "from": begin, "losses": losses, "after": fingerprint(state["model"])}))


# ------------------------------------------------------------------------------------------- the story


def story(config: Config, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All chapters; returns the figures."""
    began = time.perf_counter()
    checkpoint = folder / f"step-{arguments.resume_at}"
    text = python_text(config.text_bytes)
    state, figures = train_and_save(config, arguments.resume_at, text, checkpoint)
    figures |= continue_twice(state, text, checkpoint)
    figures["damage"] = damage(checkpoint, state, folder)
    figures["run"] = survive(arguments.text_bytes, folder, arguments.plot and os.path.abspath(arguments.plot))
    figures["speed"] = compare(state, arguments.synthetic_mb * 10**6, arguments.rounds, folder)
    figures["seconds"] = time.perf_counter() - began
    return figures


def train_and_save(
    config: Config, until: int, text: torch.Tensor, checkpoint: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Chapters 1 and 2."""
    title("1. Train")
    state = new_state(config, seed=1)
    parameters = sum(parameter.numel() for parameter in state["model"].parameters())
    say(f"text    {len(text):,} bytes of what Python says about itself: licence, language reference, docstrings")
    say(f"model   a GPT: {parameters / 1e6:.1f} million parameters in {config.layers} layers, dropout {config.dropout}")
    say("        AdamW, a one-cycle learning rate, 1 thread")
    train(state, until, text)
    shown = sorted({0, *range(9, until, 10), until - 1})
    say("loss    " + ", ".join(f"{state['losses'][step]:.3f} (step {step + 1})" for step in shown))

    title("2. Save")
    saved = shardstore.save(state, checkpoint, step=until)
    rate = saved.nbytes / saved.seconds / 1e9
    say(f">>> shardstore.save(state, {checkpoint.name!r}, step={until})")
    say(f"{_megabytes(saved.nbytes)} in {saved.seconds:.2f} s, {rate:.2f} GB/s; hashed, and on disk when it returned:")
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        say(f"{_megabytes(path.stat().st_size):>10}  {path.relative_to(checkpoint)}")
    figures = {"parameters": parameters, "text_bytes": len(text), "resume_at": until, "steps": config.steps}
    return state, figures | {"saved": {"bytes": saved.nbytes, "seconds": saved.seconds, "gb_per_s": rate}}


def continue_twice(state: dict[str, Any], text: torch.Tensor, checkpoint: Path) -> dict[str, Any]:
    """Chapter 3."""
    title("3. Continue in a fresh process")
    begin, steps = state["step"], state["config"]["steps"]
    saved_weights = fingerprint(state["model"])
    say(f"This process, uninterrupted, trains on to step {steps}.")
    train(state, steps, text)
    straight = [loss.hex() for loss in state["losses"][begin:]]
    say("A new process makes a model with other random weights, loads the checkpoint, and trains on.")
    fresh = run(sys.executable, __file__, "--resume", str(checkpoint), "--until", str(steps))
    answer = json.loads(fresh.stdout)
    say(f"{'step':>6}  {'uninterrupted':<22}resumed")
    for step, ours, theirs in list(zip(range(begin, steps), straight, answer["losses"], strict=True))[:SHOWN]:
        say(f"{step + 1:>6}  {ours:<22}{theirs:<22}{'equal' if ours == theirs else 'DIFFERENT'}")
    equal = straight == answer["losses"]
    same = fingerprint(state["model"]) == answer["after"] != saved_weights != answer["before"]
    say(f"All {len(straight)} losses are equal, bit for bit." if equal else "THE LOSSES DIFFER.")
    say(f"The weights after step {steps} are equal, bit for bit." if same else "THE WEIGHTS DIFFER.")
    losses = {"uninterrupted": straight, "resumed": answer["losses"]}
    return {"losses": losses, "equal": equal, "weights_equal": same}


def damage(checkpoint: Path, state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Chapter 4."""
    title("4. Flip one bit in a copy")
    copy = folder / "copy"
    shutil.copytree(checkpoint, copy)
    shard = next(copy.glob("model-*.safetensors"))
    place = _flip(shard)
    figures: dict[str, Any] = {"file": shard.name, "byte": place, "found": False}
    say(f"bit 0 of byte {place:,} of {copy.name}/{shard.name}")
    say("", f">>> shardstore.load({copy.name!r})")
    try:
        shardstore.load(copy)
        say("no error: THE DAMAGE WAS NOT FOUND")
    except shardstore.Damaged as error:
        figures |= {"found": error.file == shard.name, "blocks": error.blocks, "tensors": error.tensors}
        say(f"{type(error).__name__}: {error}")
    say("", f"$ shardstore verify {copy.name}")
    verified = run(sys.executable, "-m", "shardstore", "verify", copy.name, folder=folder, check=False)
    say(verified.stdout.rstrip(), "$ echo $?", str(verified.returncode))
    shutil.rmtree(copy)
    figures |= {"exit_code": verified.returncode, "torch_load": _flip_for_torch(state, folder / "weights.pt")}
    say("", f"torch.load of the same weights with one flipped bit: {figures['torch_load']}")
    return figures


def compare(state: dict[str, Any], synthetic_bytes: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Chapter 7."""
    title("7. Speed, beside torch.save and torch.load")
    plain = {"model": state["model"].state_dict(), "optimizer": state["optimizer"].state_dict()}
    large = synthetic(synthetic_bytes)
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # nothing is trained any more
    found = [{"state": name, **measure(what, folder / "speed", rounds)} for name, what in
             (("this training", plain), ("synthetic", large))]  # fmt: skip
    (folder / "speed").rmdir()
    heads = [f"{one['state']}, {_megabytes(one['bytes'])}" for one in found]
    say(" " * 26 + "".join(f"{head:>26}" for head in heads))
    for call in CALLS:
        cells = [one["calls"][call] for one in found]
        say(f"{call:<26}" + "".join(f"{cell['seconds']:>13.3f} s{cell['gb_per_s']:>6.2f} GB/s" for cell in cells))
    say(f"Medians of {rounds} rounds in which the calls take turns; loads read from the page cache.")
    say("shardstore hashes every byte as it saves and checks it as it loads; its save returns when the disk has all.")
    say("torch.save does not wait for the disk (the line below it does), and torch.load checks no sums: both do less.")
    return found


# --------------------------------------------------------------------------------------------- helpers


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.1f} kB"


def _flip(path: Path) -> int:
    """Flip the lowest bit of the byte in the middle of a file; returns where that is."""
    place = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    return place


def _flip_for_torch(state: dict[str, Any], path: Path) -> str:
    """What torch.load says to a flipped bit."""
    weights = state["model"].state_dict()
    torch.save(weights, path)
    _flip(path)
    try:
        found = torch.load(path)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is to be told
        return f"{type(error).__name__}: {error}"
    finally:
        path.unlink()
    wrong = sum(int((found[name] != tensor).sum()) for name, tensor in weights.items())
    return f"no error, and {wrong} wrong numbers" if wrong != 1 else "no error, and one wrong number"


@contextlib.contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="shardstore-demo-") as temporary:
            yield Path(temporary)
    else:
        try:
            os.mkdir(keep)
        except OSError as error:
            sys.exit(f"--keep makes a new folder, but {keep}: {error.strerror}")
        yield Path(keep).resolve()
        say("", f"The checkpoint and the runs are kept in {keep}.")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train, resume, damage a copy, kill a run, measure.")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--keep", metavar="DIR", help="make this folder and leave checkpoint and runs there")
    parser.add_argument("--plot", metavar="FILE", help="draw the losses of run and branch there, .png or .svg")
    for name, value in asdict(Config()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default {value}")
    parser.add_argument("--resume-at", type=int, default=40, metavar="STEP", help="where to save; default 40")
    parser.add_argument(
        "--synthetic-mb", type=int, default=300, metavar="MB", help="size of the second state; default 300"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of measuring; default 3")
    parser.add_argument("--resume", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Returns 1 where shardstore did not keep its word."""
    arguments = _arguments()
    torch.use_deterministic_algorithms(mode=True)
    torch.set_num_threads(1)  # one order of adding up, so one result
    if arguments.resume:
        resume(arguments.resume, arguments.until)
        return 0
    say(f"shardstore {shardstore.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    config = Config(**{name: getattr(arguments, name) for name in asdict(Config())})
    with _folder(arguments.keep) as folder:
        figures = story(config, arguments, folder)
    figures["versions"] = {
        "shardstore": shardstore.__version__, "torch": str(torch.__version__), "python": platform.python_version(),
    }  # fmt: skip
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=2) + "\n")
    kept = figures["equal"] and figures["weights_equal"] and figures["damage"]["found"] and survived(figures["run"])
    return 0 if kept and figures["damage"]["exit_code"] == shardstore.Damaged.exit_code else 1


def survived(run: dict[str, Any]) -> bool:
    """Whether the run kept all that it had promised."""
    lost = run["sigkill"]["steps_done"] - run["sigkill"]["resumes_from"]
    signals = run["sigkill"]["exit_code"] == -9 and run["sigterm"]["exit_code"] == 143
    saved = run["sigterm"]["last_step"] == run["sigterm"]["saved_step"] and lost <= 10
    equal = run["end"]["losses_equal"] and run["end"]["weights_equal"] and run["fork"]["common"]
    return signals and saved and equal


if __name__ == "__main__":
    sys.exit(main())
