"""Plain values as JSON, and back. What JSON can't say exactly is an object whose first member is `"$": tag`.

Every decoder checks all that it is given and raises BadNode, so that decoding is also the validation.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import math
import pathlib
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Node = dict[str, Any]

EXACT = 2**53
"""Integers up to here are the same in every JSON reader, also in those that only know doubles."""
MAX_INT_BITS = 1_000_000
_CHUNK = 600  # decimal digits at a time: Python may refuse to convert more than 640
_CHUNK_POWER = 10**_CHUNK

DTYPES: dict[str, torch.dtype] = {
    str(value)[len("torch.") :]: value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_NUMPY = re.compile(r"[<>|](?:b1|[iu][1248]|f[248]|c8|c16|[SU]\d{1,9}|[mM]8(?:\[\d{0,9}[A-Za-zμ]{1,8}\])?)")
_ARRAY = re.compile(r"[<>|](?:b1|[iu][1248]|f[248]|c8|c16|[mM]8(?:\[\d{0,9}[A-Za-zμ]{1,8}\])?)")


class BadNode(ValueError):
    """A part of a skeleton is not as the format says."""


class Unsupported(ValueError):
    """A value can't be stored exactly; the message says why and what to do. Callers add where it stands."""


# ------------------------------------------------------------------------------------------ numbers


def encode_int(value: int) -> int | Node:
    """As itself, or as decimal text where a reader that only knows doubles would change it."""
    if -EXACT <= value <= EXACT:
        return value
    if value.bit_length() > MAX_INT_BITS:
        raise Unsupported(f"an int of {value.bit_length()} bits is too large; store it as bytes")
    rest, chunks = abs(value), []
    while rest >= _CHUNK_POWER:
        rest, low = divmod(rest, _CHUNK_POWER)
        chunks.append(f"{low:0{_CHUNK}d}")
    return {"$": "int", "text": "-" * (value < 0) + str(rest) + "".join(reversed(chunks))}


def _decode_int(node: Node) -> int:
    text = _str(node["text"])
    if not re.fullmatch(r"-?[1-9][0-9]*", text, re.ASCII) or len(text) > MAX_INT_BITS // 3:
        raise BadNode("an int is not written as one")
    digits, value = text.lstrip("-"), 0
    head = len(digits) % _CHUNK
    for piece in [digits[:head], *(digits[at : at + _CHUNK] for at in range(head, len(digits), _CHUNK))]:
        value = value * 10 ** len(piece) + int(piece or "0")
    if value <= EXACT:
        raise BadNode("a small int is written as a large one")
    return -value if text.startswith("-") else value


def encode_float(value: float) -> float | Node:
    """As itself, or as its bits where JSON has no word for it."""
    if math.isfinite(value):
        return value
    return {"$": "float", "bits": struct.pack(">d", value).hex()}


def _decode_float(node: Node) -> float:
    bits = _str(node["bits"])
    if not re.fullmatch(r"[0-9a-f]{16}", bits):
        raise BadNode("the bits of a float are not 16 hex digits")
    value: float = struct.unpack(">d", bytes.fromhex(bits))[0]
    if math.isfinite(value):
        raise BadNode("a finite float is written as bits")
    return value


def _encode_complex(value: complex) -> Node:
    return {"$": "complex", "real": encode_float(value.real), "imag": encode_float(value.imag)}


def _decode_complex(node: Node) -> complex:
    return complex(_part(node["real"]), _part(node["imag"]))


def _part(value: Any) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, dict) and list(value) == ["$", "bits"] and value["$"] == "float":
        return _decode_float(value)
    raise BadNode("a part of a complex number is no float")


# -------------------------------------------------------------------------------------------- bytes


def _encode_bytes(value: bytes | bytearray) -> Node:
    return {"$": type(value).__name__, "data": base64.b64encode(value).decode("ascii")}


def _data(node: Node) -> bytes:
    try:
        return base64.b64decode(_str(node["data"]), validate=True)
    except (binascii.Error, ValueError):
        raise BadNode("bytes are not valid base64") from None


# -------------------------------------------------------------------------------------------- numpy


def numpy_dtype(text: Any, *, array: bool) -> np.dtype[Any]:
    """A dtype from its text in a skeleton; BadNode if it is none of those that are stored."""
    if not (_ARRAY if array else _NUMPY).fullmatch(_str(text)):
        raise BadNode(f"{text!r} is no numpy dtype that is stored")
    try:
        made: np.dtype[Any] = np.dtype(text)
        return made
    except (TypeError, ValueError):
        raise BadNode(f"{text!r} is no numpy dtype") from None


def numpy_text(dtype: np.dtype[Any], *, array: bool) -> str:
    """The text of a dtype, or Unsupported with a remedy."""
    if dtype.names is not None or not (_ARRAY if array else _NUMPY).fullmatch(dtype.str):
        raise Unsupported(f"numpy dtype {dtype} can't be stored; convert it to plain numbers, or to a list")
    return dtype.str


def encode_numpy(value: np.generic) -> Node:
    """As little-endian bytes with their dtype; Unsupported for structured, object and long double ones."""
    dtype = value.dtype.newbyteorder("<")
    text = numpy_text(dtype, array=False)
    data = np.asarray(value).astype(dtype).tobytes() if dtype.itemsize else b""  # numpy makes "" one character long
    return {"$": "numpy", "dtype": text, "data": base64.b64encode(data).decode("ascii")}


def _decode_numpy(node: Node) -> Any:
    dtype, data = numpy_dtype(node["dtype"], array=False), _data(node)
    if len(data) != dtype.itemsize:
        raise BadNode("a numpy scalar has the wrong number of bytes")
    try:
        return np.ndarray((), dtype, data)[()]
    except ValueError:
        raise BadNode("a numpy scalar is not valid") from None


# -------------------------------------------------------------------------------------- torch, time


def _decode_dtype(node: Node) -> torch.dtype:
    found = DTYPES.get(_str(node["name"]))
    if found is None:
        raise BadNode(f"this version of torch ({torch.__version__}) has no dtype {node['name']!r}")
    return found


def _decode_device(node: Node) -> torch.device:
    try:
        return torch.device(_str(node["name"]))
    except RuntimeError:
        raise BadNode(f"{node['name']!r} is no device") from None


def _decode_size(node: Node) -> torch.Size:
    items = node["items"]
    if type(items) is not list or any(type(item) is not int or not 0 <= item < 2**63 for item in items):
        raise BadNode("a Size is no list of sizes")
    return torch.Size(items)


def _decode_path(node: Node) -> pathlib.Path:
    return pathlib.Path(_str(node["text"]))


def _encode_time(value: dt.datetime | dt.time) -> Node:
    zone = value.tzinfo
    if zone is not None and not (type(zone) is dt.timezone and str(zone) == str(dt.timezone(zone.utcoffset(None)))):
        raise Unsupported("only fixed, unnamed time zones are stored; use .astimezone(datetime.timezone.utc)")
    node: Node = {"$": type(value).__name__, "text": value.isoformat()}
    return {**node, "fold": 1} if value.fold else node


def _time(kind: type[dt.datetime | dt.time | dt.date], node: Node) -> Any:
    try:
        value = kind.fromisoformat(_str(node["text"]))
    except ValueError:
        raise BadNode(f"{node['text']!r} is no {kind.__name__}") from None
    if value.isoformat() != node["text"] or node.get("fold", 1) != 1:
        raise BadNode(f"{node['text']!r} is not how a {kind.__name__} is written")
    return value.replace(fold=1) if "fold" in node else value  # type: ignore[call-arg]


def _encode_delta(value: dt.timedelta) -> Node:
    return {"$": "timedelta", "days": value.days, "seconds": value.seconds, "microseconds": value.microseconds}


def _decode_delta(node: Node) -> dt.timedelta:
    parts = node["days"], node["seconds"], node["microseconds"]
    if any(type(part) is not int for part in parts):
        raise BadNode("a timedelta is not made of ints")
    try:
        value = dt.timedelta(*parts)
    except OverflowError:
        raise BadNode("a timedelta is too large") from None
    if (value.days, value.seconds, value.microseconds) != parts:
        raise BadNode("a timedelta is not normalised")
    return value


def _str(value: Any) -> str:
    if type(value) is not str:
        raise BadNode("a text is missing")
    return value


ENCODERS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    str: lambda value: value,
    int: encode_int,
    float: encode_float,
    complex: _encode_complex,
    bytes: _encode_bytes,
    bytearray: _encode_bytes,
    torch.dtype: lambda value: {"$": "dtype", "name": str(value)[len("torch.") :]},
    torch.device: lambda value: {"$": "device", "name": str(value)},
    torch.Size: lambda value: {"$": "Size", "items": list(value)},
    type(pathlib.Path()): lambda value: {"$": "Path", "text": str(value)},
    dt.datetime: _encode_time,
    dt.time: _encode_time,
    dt.date: lambda value: {"$": "date", "text": value.isoformat()},
    dt.timedelta: _encode_delta,
}
"""By exact type. numpy scalars are many types: `encode_numpy`."""

DECODERS: dict[str, tuple[frozenset[str], Callable[[Node], Any]]] = {
    "int": (frozenset({"text"}), _decode_int),
    "float": (frozenset({"bits"}), _decode_float),
    "complex": (frozenset({"real", "imag"}), _decode_complex),
    "bytes": (frozenset({"data"}), _data),
    "bytearray": (frozenset({"data"}), lambda node: bytearray(_data(node))),
    "numpy": (frozenset({"dtype", "data"}), _decode_numpy),
    "dtype": (frozenset({"name"}), _decode_dtype),
    "device": (frozenset({"name"}), _decode_device),
    "Size": (frozenset({"items"}), _decode_size),
    "Path": (frozenset({"text"}), _decode_path),
    "datetime": (frozenset({"text"}), lambda node: _time(dt.datetime, node)),
    "time": (frozenset({"text"}), lambda node: _time(dt.time, node)),
    "date": (frozenset({"text"}), lambda node: _time(dt.date, node)),
    "timedelta": (frozenset({"days", "seconds", "microseconds"}), _decode_delta),
}
"""Tag -> (members that it has, decoder)."""
OPTIONAL = {"datetime": {"fold"}, "time": {"fold"}}

HASHABLE = frozenset(ENCODERS) - {bytearray}
"""Types that may be dict keys and members of sets, besides numpy scalars, and tuples and frozensets of such."""


def decode(node: Node) -> Any:
    """The value of a tagged scalar; BadNode for anything that is not exactly as it should be."""
    members, decoder = DECODERS[node["$"]]
    if node.keys() - OPTIONAL.get(node["$"], set()) != members | {"$"}:
        raise BadNode(f"the members of a {node['$']} are not the right ones")
    return decoder(node)
