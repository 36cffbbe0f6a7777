"""What all commands share: help, exit codes, errors, streams."""

from __future__ import annotations

import json
import os
import pty
import signal

import click
import pytest

import shardstore
from shardstore.cli import _progress, main, show
from shardstore.cli._errors import EXIT_STATUS
from shardstore.events import Progress
from tests.cli import made

COMMANDS = [["ls"], ["show"], ["verify"], ["prune", "--leftovers"]]


@pytest.mark.parametrize("words", [[], *([name] for name in main.commands)])
def test_help_shows_every_exit_code(call, words):
    """`--help` of the program and of each command lists all exit codes with their meaning."""
    result = call(*words, "--help")
    shown = result.stdout.partition("EXIT STATUS:")[2]
    assert result.exit_code == 0
    for code, meaning in EXIT_STATUS.items():
        assert f"  {code} " in shown
        assert meaning in shown


@pytest.mark.parametrize("name", main.commands)
def test_every_command_takes_json(name):
    """No command is without --json, so a new one can't forget it."""
    assert any("--json" in parameter.opts for parameter in main.commands[name].params)


def test_version(call):
    """`--version` is the package's."""
    assert call("--version").stdout == f"shardstore, version {shardstore.__version__}\n"


@pytest.mark.parametrize("words", COMMANDS)
def test_nothing_there_is_5(call, call_json, shm_path, words):
    """Every command exits 5 where nothing is, with one line on stderr, or one document that says so."""
    result = call(*words, shm_path)
    assert (result.exit_code, result.stdout) == (5, "")
    assert result.stderr.startswith("shardstore: ")
    assert result.stderr.count("\n") == 1
    code, document = call_json(*words, shm_path / "gone")
    assert code == document["error"]["exit_code"] == 5
    assert document["error"]["kind"] == "CheckpointNotFound"
    assert str(shm_path) in document["error"]["message"]


@pytest.mark.parametrize(
    "words", [["ls"], ["ls", ".", "--nope"], ["nope"], ["verify", ".", "--threads", "0"], ["prune", "."]]
)
def test_usage_is_2(call, call_json, words):
    """A command line that makes no sense exits 2 and points to the help, also as JSON."""
    result = call(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--help'" in result.stderr
    code, document = call_json(*words)
    assert code == document["error"]["exit_code"] == 2
    assert document["error"]["kind"] == "Usage"


def test_no_command_shows_the_help(call):
    """`shardstore` alone is a usage error that shows the help."""
    result = call()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Commands:" in result.stderr


def test_prune_without_a_kind_names_what_exists(call, shm_path):
    """`prune` alone removes nothing and says what could be pruned."""
    assert "--leftovers" in call("prune", made.unfinished(shm_path, hours=30), "--yes").stderr
    assert len(list(shm_path.iterdir())) == 2


@pytest.mark.parametrize("words", COMMANDS)
def test_unknown_version_is_7(call, shm_path, words):
    """An index of a newer schema exits 7 with every command, and nothing is removed."""
    (shm_path / "shardstore.json").write_text('{"schema":"shardstore/2"}')
    made.unfinished(shm_path, hours=30)
    result = call(*words, shm_path, *(["--yes"] if "prune" in words else []))
    assert result.exit_code == 7
    assert "shardstore/2" in result.stdout + result.stderr
    assert len(list(shm_path.iterdir())) == 3


@pytest.mark.parametrize("words", COMMANDS)
def test_damaged_index_is_3(call, shm_path, words):
    """A damaged index exits 3 with every command, names the file, and nothing is removed."""
    made.checkpoint(shm_path)
    made.flip(shm_path / "shardstore.json", 300)
    made.unfinished(shm_path, hours=30)
    before = sorted(shm_path.rglob("*"))
    result = call(*words, shm_path, *(["--yes"] if "prune" in words else []))
    assert result.exit_code == 3
    assert "shardstore.json" in result.stdout + result.stderr
    assert sorted(shm_path.rglob("*")) == before


def test_error_details_reach_json(call_json, shm_path):
    """--json carries what an error knows: kind, file, blocks."""
    made.checkpoint(shm_path)
    made.flip(shm_path / "shardstore.json", 300)
    _, document = call_json("show", shm_path)
    error = document["error"]
    assert (error["kind"], error["file"], error["exit_code"]) == ("Damaged", "shardstore.json", 3)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_bug_is_not_swallowed(call, monkeypatch, shm_path, flags):
    """An exception that is none of ours exits 1 with its traceback, and as JSON is a document, too."""

    def broken(store):
        raise RuntimeError("a bug")

    monkeypatch.setattr(show, "need_index", broken)
    result = call("show", shm_path, *flags)
    assert result.exit_code == 1
    assert isinstance(result.exception, RuntimeError)
    if flags:
        assert json.loads(result.stdout)["error"] == {"kind": "RuntimeError", "message": "a bug", "exit_code": 1}


def test_names_can_not_steer_the_terminal(call, shm_path):
    """Control characters of names are shown as text, and so is what looks like markup."""
    tensors = {
        "model/[red]x": ("uint8", (1,)),
        "model/a\x1b[31mb\nc\u202e": ("uint8", (1,)),
        "model/größe": ("uint8", (1,)),
    }
    made.checkpoint(shm_path, tensors=tensors, ties={})
    (shm_path / "odd\nname\x9b").touch()
    made.flip(next(shm_path.glob("model-*")), -1)
    for command in ("show", "verify"):
        out = call(command, shm_path).stdout
        assert "model/[red]x" in out
        assert "model/a\\x1b[31mb\\nc\\u202e" in out
        assert "model/größe" in out
        assert all(line.isprintable() for line in out.split("\n"))
    assert "odd\\nname\\x9b" in out


def test_error_is_one_line(call):
    """A newline in what the user gave does not break the one line of an error."""
    assert call("ls", "no\nsuch").stderr.count("\n") == 1


@pytest.mark.parametrize("words", COMMANDS)
def test_start_is_lean(start, run_folder, words):
    """No command imports torch, or anything else that takes long to import."""
    script = (
        "import sys; from shardstore.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code in {0, 4}, end.code\n"
        "heavy = {'torch', 'numpy', 'fsspec', 's3fs', 'asyncio', 'rich.console'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    where = run_folder / "step-9" if "show" in words else run_folder
    done = start(*words, where, script=script)
    assert (done.returncode, done.stderr) == (0, "")


def test_import_brings_no_torch(start):
    """`import shardstore.cli` alone imports no torch."""
    assert start(script="import shardstore.cli, sys; sys.exit('torch' in sys.modules)").returncode == 0


@pytest.mark.parametrize(("words", "code"), [(["verify"], 4), (["ls"], 0), (["ls", "--nope"], 2)])
def test_real_exit_codes(start, run_folder, words, code):
    """The process itself ends with the exit code."""
    assert start(*words, run_folder).returncode == code


def test_a_latin_terminal_shows_names_escaped(start, shm_path):
    """A name that the terminal's encoding lacks is escaped, and no error."""
    made.checkpoint(shm_path, tensors={"model/模": ("uint8", (1,))}, ties={})
    script = (
        "import sys; sys.stdout.reconfigure(encoding='latin-1'); from shardstore.cli import main; main(sys.argv[1:])"
    )
    done = start("show", shm_path, script=script)
    assert (done.returncode, done.stderr) == (0, "")
    assert "model/\\u6a21" in done.stdout


@pytest.mark.parametrize("words", [["show"], ["show", "--json"], ["ls", "--json", "--nope"]])
def test_a_closed_pipe_is_quiet(start, run_folder, words):
    """Where the reader of a pipe has gone (`| head`), nothing is complained about."""
    reader, writer = os.pipe()
    os.close(reader)
    done = start(*words, run_folder / "step-9", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_output_that_can_not_be_written_is_an_error(start, run_folder):
    """A full disk under stdout is an error in one line."""
    with open("/dev/full", "w") as full:
        done = start("ls", run_folder, stdout=full)
    assert done.returncode == 1
    assert done.stderr.startswith("shardstore: writing the output failed: ")
    assert done.stderr.count("\n") == 1


def test_progress_is_shown_on_a_terminal(start, run_folder):
    """With stderr on a terminal, verify shows the name, bytes and rate; stdout stays free of it."""
    master, slave = pty.openpty()
    done = start("verify", run_folder / "step-9", stderr=slave)
    os.close(slave)
    shown = b""
    with open(master, "rb", buffering=0) as terminal:
        try:
            while data := terminal.read(65536):
                shown += data
        except OSError:
            pass  # Linux: all of the terminal's other side is closed
    assert done.returncode == 0
    assert b"step-9" in shown
    assert b"MB" in shown
    assert "\x1b" not in done.stdout


def test_no_progress_in_a_pipe(start, run_folder):
    """With stderr in a pipe, verify writes nothing to it."""
    done = start("verify", run_folder / "step-9")
    assert (done.returncode, done.stderr) == (0, "")


def test_interrupt_is_130(start, run_folder):
    """Ctrl-C in the midst of a verify ends the process with 130 and one remark, and the document says so."""
    script = (
        "import os, signal, sys\n"
        "from shardstore.cli import main\n"
        "from shardstore.storage import LocalStore\n"
        "LocalStore.read_into = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "main(sys.argv[1:])\n"
    )
    done = start("verify", run_folder / "step-9", "--threads", "2", "--json", script=script)
    assert done.returncode == 130
    assert json.loads(done.stdout)["error"] == {"kind": "Interrupted", "message": "interrupted", "exit_code": 130}
    assert done.stderr.split("\n")[-2] == "shardstore: interrupted"
    assert "Traceback" not in done.stderr


def test_after_an_interrupt_the_threads_end_at_their_next_block():
    """The listener of a watched work refuses to go on after Ctrl-C, and the old handler is back afterwards."""
    before = signal.getsignal(signal.SIGINT)
    with _progress.watching() as listen:
        listen(Progress("verify", "x", 1))
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(_progress._Stopped):
            listen(Progress("verify", "x", 1))
    assert signal.getsignal(signal.SIGINT) is before


def test_module_and_click_group_are_one(call):
    """The entry point of pyproject.toml is the click group that `python -m shardstore` runs."""
    assert isinstance(main, click.Group)
    assert sorted(main.commands) == [
        "convert", "diff", "fork", "ls", "migrate", "pin", "pivot", "plot", "prune", "show", "verify",
    ]  # fmt: skip
