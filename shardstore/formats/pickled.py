"""Pickles as data: a stack machine for the opcodes that plain values need, which imports nothing and calls nothing.

What a pickle would import becomes a `Name`, if it is on the caller's list, and what it would make of one a `Made`.
Memory and time are in proportion to the bytes that are read. Source of the opcodes: Python's `pickletools`.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, NoReturn

from shardstore.errors import Damaged, UnsupportedState


class Name(NamedTuple):
    """Something that the pickle names in a module."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Made:
    """An object that would be made: by calling `name` with `args`, and then given `state`."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: Name, args: tuple[Any, ...]) -> None:
        self.name, self.args = name, args
        self.state: Any = None


class _Mark:
    """Where a run of items begins on the stack."""


_VALUES = {
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE",
    "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read(data: bytes, where: str, allowed: Callable[[Name], bool]) -> Any:
    """The value of a pickle. `where` names its file in errors; `allowed` says which names it may hold.

    Raises UnsupportedState for another name or an opcode that no plain data needs; Damaged for what is no pickle.
    """
    machine = _Machine(where, allowed)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.result()
            machine.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        if isinstance(error, Damaged | UnsupportedState):
            raise
        machine.bad(f"{type(error).__name__}: {str(error)[:80]}")
    return machine.bad("it has no end")


class _Machine:
    def __init__(self, where: str, allowed: Callable[[Name], bool]) -> None:
        self._where, self._allowed = where, allowed
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def bad(self, why: str) -> NoReturn:
        raise Damaged(f"{self._where} can't be read: {why}", file=self._where)

    def result(self) -> Any:
        (value,) = self._stack
        return value

    def step(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            self._stack.append(_CONSTANTS.get(name, argument))
        elif name in _TUPLES:
            count = _TUPLES[name]
            self._stack.append(tuple(self._pop(count)))
        else:
            how = self._STEPS.get(name)
            if how is None:
                raise UnsupportedState(
                    f"{self._where} holds the pickle instruction {name}, which plain data needs not: nothing was run",
                    path="",
                )
            how(self, argument)

    def _pop(self, count: int) -> list[Any]:
        """The last `count` values."""
        if len(self._stack) < count or any(
            isinstance(value, _Mark) for value in self._stack[len(self._stack) - count :]
        ):
            self.bad("a value is missing")
        taken = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return taken

    def _pop_mark(self) -> list[Any]:
        """All values since the last mark."""
        at = next((at for at in range(len(self._stack) - 1, -1, -1) if isinstance(self._stack[at], _Mark)), None)
        if at is None:
            self.bad("a mark is missing")
        taken = self._stack[at + 1 :]
        del self._stack[at:]
        return taken

    def _nothing(self, _: Any) -> None:
        """A frame or the protocol."""

    def _mark(self, _: Any) -> None:
        self._stack.append(_Mark())

    def _dict(self, _: Any) -> None:
        self._stack.append({})

    def _list(self, _: Any) -> None:
        self._stack.append([])

    def _tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._pop_mark()))

    def _memoize(self, argument: Any) -> None:
        (value,) = self._pop(1)
        self._stack.append(value)
        self._memo[len(self._memo) if argument is None else argument] = value

    def _get(self, argument: Any) -> None:
        self._stack.append(self._memo[argument])

    def _append(self, _: Any) -> None:
        self._extend(self._pop(1))

    def _appends(self, _: Any) -> None:
        self._extend(self._pop_mark())

    def _extend(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            self.bad("an item is added to what is no list")
        self._stack[-1].extend(values)

    def _setitem(self, _: Any) -> None:
        self._update(self._pop(2))

    def _setitems(self, _: Any) -> None:
        self._update(self._pop_mark())

    def _update(self, values: list[Any]) -> None:
        """Keys that are containers are refused: their hashing has no bound."""
        target = self._stack[-1]
        if type(target) is not dict or len(values) % 2:
            self.bad("an item is set in what is no dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in (str, int, bool, bytes, type(None), Made):
                self.bad(f"a dict has a key of {type(key).__name__}")
            target[key] = value

    def _global(self, argument: Any) -> None:
        module, _, name = str(argument).partition(" ")
        self._name(module, name)

    def _stack_global(self, _: Any) -> None:
        self._name(*self._pop(2))

    def _name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            self.bad("a name is no text")
        found = Name(module, name)
        if not self._allowed(found):
            raise UnsupportedState(
                f"{self._where} names {str(found)[:120]!r}, which such a file does not need: nothing was run", path=""
            )
        self._stack.append(found)

    def _make(self, _: Any) -> None:
        name, arguments = self._pop(2)
        if not isinstance(name, Name) or type(arguments) is not tuple:
            self.bad("something is called that has no name")
        self._stack.append(Made(name, arguments))

    def _build(self, _: Any) -> None:
        (state,) = self._pop(1)
        if not isinstance(self._stack[-1], Made):
            self.bad("a state is given to what has none")
        self._stack[-1].state = state

    _STEPS: ClassVar[dict[str, Callable[[_Machine, Any], None]]] = {
        "PROTO": _nothing, "FRAME": _nothing, "MARK": _mark,
        "EMPTY_DICT": _dict, "EMPTY_LIST": _list, "TUPLE": _tuple,
        "MEMOIZE": _memoize, "BINPUT": _memoize, "LONG_BINPUT": _memoize,
        "BINGET": _get, "LONG_BINGET": _get,
        "APPEND": _append, "APPENDS": _appends,
        "SETITEM": _setitem, "SETITEMS": _setitems,
        "GLOBAL": _global, "STACK_GLOBAL": _stack_global,
        "REDUCE": _make, "NEWOBJ": _make, "BUILD": _build,
    }  # fmt: skip
