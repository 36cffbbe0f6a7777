"""`convert`: a checkpoint of any format as one of another, streamed, and read back before it counts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from shardstore.check import verify
from shardstore.errors import Damaged, InvalidArgument, Mismatch, brief
from shardstore.events import Listener, Noticed, to_log
from shardstore.formats.casting import cast, check_dtype
from shardstore.formats.files import refuse_existing
from shardstore.formats.flat_run import FlatRunFormat, chosen_steps
from shardstore.formats.layout import Layout
from shardstore.formats.port import Foreign, Format, Options, local
from shardstore.formats.runs import Opener, save_as_run
from shardstore.formats.store import StoreFormat, save_again
from shardstore.formats.table import by_name, detect, meant_by

Steps: TypeAlias = Literal["newest", "all"] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Converted:
    """What was made. `source` and `target`: names of the formats. `notes`: what a person should know of it."""

    url: str
    source: str
    target: str
    step: int | None
    notes: tuple[str, ...]
    seconds: float


def convert(  # noqa: PLR0913 - the public face: every argument but two has a default
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, from_format: str | None = None,
    to_format: str | None = None, run: bool | None = None, steps: Steps = "newest",
    layout: Layout | str | os.PathLike[str] | None = None, model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None, dtype: Any = None, only: Sequence[str] = (),
    step: int | None = None, max_shard_bytes: int | None = None, listener: Listener | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Converted:  # fmt: skip
    """Convert a checkpoint; returns when it is written, durable, and has been read back.

    `source`: a checkpoint of a store, `RUN@STEP`, or a file or folder of another format; `target`: a place where
    nothing is. Formats are found by looking; the target's by its name: `.bin` is a flat file, `.pt` torch's, another
    place a store. `from_format`, `to_format`: a name of `FORMATS`, to force one.
    `run`: make the target a run that holds the checkpoint, so that `Checkpointer` resumes from it; default for folders
    of flat files, of which `steps` chooses: `newest`, `all`, or a list.
    `layout`: for flat files, a `Layout` or the path of a JSON file; or `model`, with its `optimizer`, to take it from.
    `dtype`: convert the floating-point tensors, but for single numbers; nothing is cast without it.
    `only`: sections of the state; default all. `step`: where the source doesn't say it. `max_shard_bytes`: of files in
    a folder of shards. Memory: one tensor for each thread that writes, and some buffers.

    Raises CheckpointExists; UnsupportedState where the target can't hold the state, before a byte is written; Damaged
    where the source is damaged, or what was written reads back differently; StoreError, InvalidArgument.
    """
    began = time.perf_counter()
    src, dst = os.fspath(source), os.fspath(target)
    reader = by_name(from_format) if from_format else detect(src)
    writer = by_name(to_format or StoreFormat.name) if to_format or run else meant_by(dst)
    options = Options(
        layout=_layout(layout, model, optimizer), step=step, listener=to_log if listener is None else listener,
        storage_options=storage_options,
    )  # fmt: skip
    if max_shard_bytes is not None:
        options = dataclasses.replace(options, max_shard_bytes=_positive("max_shard_bytes", max_shard_bytes))
    work = _Work(src, reader, options, only, check_dtype(dtype))
    folder = isinstance(reader, FlatRunFormat)
    if run or (run is None and folder and to_format is None and writer.name == StoreFormat.name):
        if writer.name != StoreFormat.name:
            raise InvalidArgument(f"a run is made of checkpoints of a store, not of {writer.name}: leave out run=")
        save_as_run(dst, work.openers(chosen_steps(local(src), steps) if folder else [None]), options)
    else:
        _refuse_existing(writer, dst)
        with work.opened(None) as found:
            _write(found, writer, dst, dataclasses.replace(options, step=work.step))
    return Converted(dst, reader.name, writer.name, work.step, tuple(work.notes), time.perf_counter() - began)


class _Work:
    """One conversion: opens its source, as it is wanted, and remembers what is to be told of it."""

    def __init__(
        self, source: str, reader: Format, options: Options, only: Sequence[str], dtype: str | None
    ) -> None:  # fmt: skip
        self.notes: list[str] = []
        self.step = options.step
        self._source, self._reader, self._options, self._only, self._dtype = source, reader, options, only, dtype

    def openers(self, steps: Sequence[int | None]) -> list[Opener]:
        """What opens each of the steps; None is the one that there is."""
        return [functools.partial(self.opened, step) for step in steps]

    @contextlib.contextmanager
    def opened(self, step: int | None) -> Iterator[Foreign]:
        """The source, or one step of it, with the sections that are wanted, in the dtype that is."""
        with self._open(step) as found:
            state = _chosen(found.state, self._only, found.url)
            if self._dtype is not None:
                state = cast(state, self._dtype)
            if state is not found.state:
                found.state, found.flat = state, None
            self.step = found.step if self._options.step is None else self._options.step
            yield found
            for note in found.notes:
                self.notes.append(note)
                if self._options.listener is not None:
                    self._options.listener(Noticed(note, found.url))

    def _open(self, step: int | None) -> Foreign:
        path = self._source if self._reader.name == StoreFormat.name else local(self._source)
        if step is not None and isinstance(self._reader, FlatRunFormat):
            return self._reader.read_step(path, step, self._options)
        return self._reader.read(path, self._options)


def _write(found: Foreign, writer: Format, dst: str, options: Options) -> None:
    if writer.name != StoreFormat.name:
        writer.write(found.state, local(dst), options)
        return
    if found.flat is not None:
        save_again(found.flat, dst, options)
    else:
        writer.write(found.state, dst, options)
    report = verify(dst, listener=options.listener, storage_options=options.storage_options)
    if not report.ok:
        problems = [problem.message for one in report.checkpoints for problem in one.problems]
        raise Damaged(f"{dst} was written, and does not read back: {'; '.join(problems)[:300]}", file=dst)


def _chosen(state: Any, only: Sequence[str], url: str) -> Any:
    """The sections that are wanted; the very same state where all are."""
    if not only:
        return state
    if isinstance(only, str):
        raise InvalidArgument(f"only is a list of sections, not {brief(only)}")
    missing = [name for name in only if not isinstance(state, dict) or name not in state]
    if missing:
        raise Mismatch(f"{url} has no section {', '.join(map(repr, missing))}", missing=tuple(missing))
    return {name: value for name, value in state.items() if name in only}


def _refuse_existing(writer: Format, dst: str) -> None:
    """Whatever lies there but an empty folder is left alone. A store looks for itself."""
    if writer.name == StoreFormat.name:
        return
    path = local(dst)
    if os.path.islink(path) or not os.path.isdir(path) or os.listdir(path):
        refuse_existing(path)


def _layout(layout: Any, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None) -> Layout | None:
    if model is not None:
        if layout is not None:
            raise InvalidArgument("give either layout= or model=: the model has a layout of its own")
        return Layout.of(model, optimizer)
    if layout is None or isinstance(layout, Layout):
        return layout
    return Layout.read(layout)


def _positive(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise InvalidArgument(f"{name} must be a whole number from 1 on, not {brief(value)}")
    return value
