"""The second half of the demo: a run that is killed in a save, asked to save, stopped, turned, and forked."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _gpt import Config
from _telling import run, say, title

from shardstore import Run

EVERY = 10
PATIENCE_S = 60.0


class Trainee:
    """A process that trains a run to its end, unless somebody stops it."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder = folder
        command = [sys.executable, str(Path(__file__).with_name("demo_training.py")), str(folder)]
        command.append(json.dumps(dataclasses.asdict(config)))
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def when(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so; an error if the training ends before."""
        until = time.monotonic() + PATIENCE_S
        while not condition():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the training did not come so far: {self._process.communicate()[1]}")
            time.sleep(0.001)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, dict[str, Any], list[str]]:
        """Wait for the end: exit code, what it says of itself, and what it was warned of."""
        out, told = self._process.communicate()
        return self._process.returncode, json.loads(out or "{}"), told.splitlines()


def survive(text_bytes: int, folder: Path, plot: str | None) -> dict[str, Any]:
    """Chapters 5 and 6; returns the evidence."""
    config = Config(layers=2, width=128, context=64, steps=60, text_bytes=text_bytes)
    title("5. A run that survives")
    say(f"{config.steps} steps of a smaller model, a save every {EVERY}; each start is a new process, which resumes.")
    whole, place = folder / "whole", folder / "run"
    uninterrupted = Trainee(whole, config)
    code, expected, _ = uninterrupted.end()
    found: dict[str, Any] = {"uninterrupted": {"exit_code": code, **expected}}
    found["sigkill"] = killed_in_a_save(config, place)
    trainee = Trainee(place, config)
    found["sigusr1"] = asked_to_save(trainee, found["sigkill"]["resumes_from"])
    found["sigterm"] = stopped(trainee)
    found["end"] = to_the_end(config, place, whole, expected)
    say("", "$ shardstore ls run", shell("ls", str(place), folder=folder))
    title("6. Turn, and branch")
    found["pivot"] = turned(place)
    found["fork"] = forked(config, place, folder)
    found["plot"] = plotted(place, folder / "branch", plot)
    return found


def killed_in_a_save(config: Config, place: Path) -> dict[str, Any]:
    """SIGKILL as soon as files of a save begin to come, when there is a checkpoint already."""
    attempts, code = 0, 0
    while not unfinished(place) and attempts < 5:  # it may have been quicker: the same with the next save
        attempts += 1
        trainee = Trainee(place, config)
        trainee.when(lambda: bool(committed(place)) and bool(unfinished(place)))
        trainee.send(signal.SIGKILL)
        code = trainee.end()[0]
    cut = unfinished(place)[-1]
    files = files_in(cut)
    done, newest = max(losses(place)), max(map(step_of, committed(place)))
    say(f"SIGKILL in the save of step {step_of(cut)}: {cut.name} has no index, but", *(f"  {name}" for name in files))
    say(f"it was at step {done}, the newest checkpoint is that of step {newest}: {done - newest} steps to do again")
    return {
        "exit_code": code, "step": step_of(cut), "files": files, "attempts": attempts, "steps_done": done,
        "resumes_from": newest,
    }  # fmt: skip


def asked_to_save(trainee: Trainee, begin: int) -> dict[str, Any]:
    """SIGUSR1 in the midst of an interval."""
    place = trainee.folder
    trainee.when(lambda: resumed(place) == begin and max(losses(place)) > begin + 2)
    step = 0
    while step % EVERY == 0:  # where it came just when a save was due anyway: once more
        before = set(committed(place))
        trainee.send(signal.SIGUSR1)
        trainee.when(lambda before=before: bool(set(committed(place)) - before))
        step = min(step_of(path) for path in set(committed(place)) - before)
    say(f"started again, from step {begin}; SIGUSR1: step {step} is saved, and training goes on")
    return {"resumed_from": begin, "saved_step": step}


def stopped(trainee: Trainee) -> dict[str, Any]:
    """SIGTERM some steps later."""
    place = trainee.folder
    later = max(losses(place)) + 4
    trainee.when(lambda: max(losses(place)) >= later)
    trainee.send(signal.SIGTERM)
    code, _, _ = trainee.end()
    last, saved = max(losses(place)), max(map(step_of, committed(place)))
    say(f"SIGTERM: exit code {code}; the last step was {last}, and step {saved} is saved")
    return {"exit_code": code, "last_step": last, "saved_step": saved}


def to_the_end(config: Config, place: Path, whole: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """The rest, and the comparison with the run that nothing stopped."""
    code, reached, _ = Trainee(place, config).end()
    ours, theirs = losses(place), losses(whole)
    equal, same = ours == theirs, reached["weights"] == expected["weights"]
    say(f"started again, from step {reached['from']} to step {max(ours)}")
    say(
        f"All {len(ours)} losses are those of a run that nothing stopped, bit for bit."
        if equal
        else "THE LOSSES DIFFER."
    )
    say("So are the weights." if same else "THE WEIGHTS DIFFER.")
    hexed = [loss.hex() for loss in ours.values()]
    return {"exit_code": code, **reached, "losses": hexed, "losses_equal": equal, "weights_equal": same}


def turned(place: Path) -> dict[str, Any]:
    """A pivot: the samples begin anew, the old ones stay, the losses go on."""
    say("$ shardstore pivot run", shell("pivot", str(place), folder=place.parent))
    with Run(place) as one:
        old, new = one.sidecar("samples", generation=0).read([]), one.sidecar("samples").read([])
        generation = one.info.generation
    say(f"samples of generation 0: {len(old)}, up to step {old[-1]['step']}; of generation {generation}: {len(new)}")
    return {"generation": generation, "samples_before": len(old), "samples_after": len(new)}


def forked(config: Config, place: Path, folder: Path) -> dict[str, Any]:
    """A fork at two thirds of the way, which goes on without dropout."""
    step = config.steps * 2 // 3 // 20 * 20
    say("", f"$ shardstore fork run@{step} branch", shell("fork", f"{place}@{step}", "branch", folder=folder))
    branch = folder / "branch"
    code, reached, told = Trainee(branch, dataclasses.replace(config, dropout=0.0)).end()
    say(f"branch trains on from step {reached['from']} without dropout. It was told:", *told)
    ours, theirs = losses(place), losses(branch)
    common = all(ours[number] == theirs[number] for number in range(1, step + 1))
    say(f"{'step':>6}{'run':>10}{'branch':>10}")
    for number in sorted({step, *range(step + 5, config.steps, 5), config.steps}):
        say(f"{number:>6}{ours[number]:>10.4f}{theirs[number]:>10.4f}")
    say(
        f"Their losses are equal up to step {step}, and differ from there on."
        if common
        else "THE LOSSES BEFORE DIFFER."
    )
    return {
        "exit_code": code, "step": step, "from": reached["from"], "told": told, "common": common,
        "run": ours[config.steps], "branch": theirs[config.steps],
    }  # fmt: skip


def plotted(place: Path, branch: Path, file: str | None) -> str | None:
    """Both in one picture, where matplotlib is installed and the picture is wanted."""
    if file is None or find_spec("matplotlib") is None:
        return None
    say("", f"$ shardstore plot run branch -o {file}", shell("plot", str(place), str(branch), "-o", file))
    return file


# --------------------------------------------------------------------------------------------- helpers


def shell(*words: str, folder: Path | None = None) -> str:
    """What the command line says."""
    return run(sys.executable, "-m", "shardstore", *words, folder=folder).stdout.rstrip()


def unfinished(place: Path) -> list[Path]:
    """Folders of saves that have begun and not ended: besides their mark there is something, but no index."""
    begun = {path.parent for path in place.glob("step-*/attempt-*.json")} - set(committed(place))
    return sorted(path for path in begun if len(files_in(path)) > 1)


def files_in(folder: Path) -> list[str]:
    """The files of a checkpoint, temporary ones included."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def committed(place: Path) -> list[Path]:
    """Folders of whole checkpoints."""
    return sorted(path.parent for path in place.glob("step-*/shardstore.json"))


def step_of(path: Path) -> int:
    """The step in the name of a folder."""
    return int(path.name.split("-")[1])


def losses(place: Path) -> dict[int, float]:
    """The loss of each step."""
    with Run(place) as one:
        return dict(one.losses())


def resumed(place: Path) -> int:
    """Where the last start went on; -1 before it has."""
    with Run(place) as one:
        return max((event.step for event in one.losses().events if event.kind == "resume"), default=-1)
