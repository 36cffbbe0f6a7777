"""What all commands have in common: the exit codes in each help, and the border at which errors become exit codes."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.exceptions import NoArgsIsHelpError

from shardstore.cli import _errors
from shardstore.cli._output import OutputLost, complain, put_json
from shardstore.errors import ShardstoreError

JSON = "--json"


class Command(click.Command):
    """A command whose help ends with the exit codes. Its function returns the exit code."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 click calls it
        with formatter.section("EXIT STATUS"):
            formatter.write_dl([(str(code), meaning) for code, meaning in _errors.EXIT_STATUS.items()])


class Program(Command, click.Group):
    """The group of all commands, which turns every error into one line (or one JSON document) and an exit code."""

    command_class = Command

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, complete_var: str | None = None,
        standalone_mode: bool = True, **extra: Any,  # noqa: FBT001, FBT002 click's signature
    ) -> Any:  # fmt: skip
        """Run one command and leave the process with its exit code. An error that is a bug shows its traceback, too."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode, **extra)
        words = list(sys.argv[1:] if args is None else args)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # a name that a terminal can't show is no reason to fail
        try:
            code = self._run(words, prog_name, complete_var, extra)
        except OutputLost as error:
            code = _lost(error)
        sys.exit(code)

    def _run(self, words: list[str], prog_name: str | None, complete_var: str | None, extra: Mapping[str, Any]) -> int:
        """Run one command; its exit code, or that of the error that it ended with."""
        as_json = JSON in words  # also where the command line can't be understood
        try:
            code = super().main(words, prog_name, complete_var, standalone_mode=False, **extra)
            return int(code or 0)
        except NoArgsIsHelpError as error:
            error.show()
            return error.exit_code
        except (ShardstoreError, click.ClickException, click.Abort) as error:
            if as_json:
                put_json({"error": _errors.as_json(error)})
            complain(_errors.message(error))
            return _errors.code(error)
        except OutputLost:
            raise
        except Exception as error:
            if as_json:
                put_json({"error": _errors.as_json(error)})
            raise


def _lost(lost: OutputLost) -> int:
    """Quiet if the reader of a pipe has gone."""
    # What is left in the old buffer would fail again when the interpreter ends.
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if lost.why.errno == errno.EPIPE:
        return _errors.PIPE_CLOSED
    with contextlib.suppress(OutputLost):
        complain(f"writing the output failed: {lost.why.strerror or lost.why}")
    return 1


command = functools.partial(click.command, cls=Command)
url_argument = click.argument("url")
roots_argument = click.argument("urls", nargs=-1, required=True, metavar="URL [URL...]")
"""One place; or all the roots of one striped checkpoint, in any order."""
json_option = click.option(JSON, "as_json", is_flag=True, help="Write one JSON document, with exact numbers.")
