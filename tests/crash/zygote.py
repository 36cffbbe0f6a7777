"""Real processes at the price of a fork: a process that has imported all, runs on one thread, and forks at command.

It takes a line of JSON at a time: `{"job": ..., ...}` forks a process that does the job, `{"pid": ...}` waits until
that one has ended or stopped, `{}` ends it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """How a process is: stopped, killed by `signal`, or ended with the `value` of its job."""

    stopped: bool = False
    signal: int = 0
    value: Any = None


@dataclass(frozen=True)
class Child:
    """A process that does a job."""

    zygote: Zygote
    pid: int

    def wait(self) -> Outcome:
        """Until it has ended, or stopped."""
        return Outcome(**self.zygote.ask(pid=self.pid))

    def wake(self) -> None:
        """Let it go on after it has stopped."""
        os.kill(self.pid, signal.SIGCONT)


class Zygote:
    """The side of the tests. Processes that are still there in the end are killed.

    `jobs`: the module with `JOBS`, and with `warm_up`, which imports what they need.
    """

    def __init__(self, jobs: str = "tests.crash.jobs") -> None:
        command = [sys.executable, "-m", "tests.crash.zygote", jobs]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.write("{}\n")  # an end of file may never come: other forks hold the pipe open
            self._process.stdin.close()

    def start(self, job: str, **arguments: Any) -> Child:
        """Let a new process do a job."""
        return Child(self, self.ask(job=job, **arguments)["pid"])

    def run(self, job: str, **arguments: Any) -> Outcome:
        """Let a new process do a job, and wait for what becomes of it."""
        return self.start(job, **arguments).wait()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request, default=str) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


class _Server:
    """The side that forks."""

    def __init__(self, jobs: dict[str, Callable[..., Any]]) -> None:
        self._jobs = jobs
        self._answers: dict[int, int] = {}

    def serve(self) -> None:
        for line in sys.stdin:
            request = json.loads(line)
            if not request:
                break
            answer = self._wait(request["pid"]) if "pid" in request else self._fork(**request)
            print(json.dumps(answer), flush=True)
        for pid in self._answers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _fork(self, job: str, **arguments: Any) -> dict[str, Any]:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            self._be(self._jobs[job], arguments, write)
        os.close(write)
        self._answers[pid] = read
        return {"pid": pid}

    def _be(self, job: Callable[..., Any], arguments: dict[str, Any], write: int) -> NoReturn:
        code = 1
        try:
            os.dup2(2, 1)  # what is printed must not pass for an answer
            os.write(write, json.dumps(job(**arguments)).encode())
            code = 0
        except BaseException:  # noqa: BLE001  nothing may get back into the loop
            traceback.print_exc()
        finally:
            os._exit(code)

    def _wait(self, pid: int) -> dict[str, Any]:
        _, status = os.waitpid(pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            return {"stopped": True}
        with os.fdopen(self._answers.pop(pid), "rb") as answer:
            data = answer.read()
        return {"signal": os.WTERMSIG(status), "value": json.loads(data) if data else None}


if __name__ == "__main__":
    work = importlib.import_module(sys.argv[1])
    work.warm_up()
    _Server(work.JOBS).serve()
