"""tensorizer: one file with a CRC-32 and a SHA-256 of every tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from benchmarks.states import Case, leaves
from benchmarks.systems.base import System, flush, needs

NAME = "state.tensors"


class Tensorizer(System):
    """It always hashes what it saves; a load checks that on request."""

    name = "tensorizer"
    files = "tensorizer"
    lacks = "fsync, atomic commit, structure"
    cannot: ClassVar = {"many-small": "it fails to save 100,000 tensors, with 'Metadata overflow'"}
    calls: ClassVar = {
        "save": "TensorSerializer.write_state_dict",
        "save-durable": "TensorSerializer.write_state_dict, fsync",
        "load-fresh": "TensorDeserializer(verify_hash=True)",
    }

    def missing(self) -> str | None:
        return needs("tensorizer")

    def save(self, case: Case, folder: Path, *, durable: bool) -> None:
        from tensorizer import TensorSerializer

        serializer = TensorSerializer(str(folder / NAME))
        serializer.write_state_dict(dict(leaves(case.state)))
        serializer.close()
        if durable:
            flush(folder / NAME)

    def load_fresh(self, case: Case, folder: Path) -> Any:
        from tensorizer import TensorDeserializer

        with TensorDeserializer(
            str(folder / NAME), device="cpu", verify_hash=True, num_readers=case.threads
        ) as deserializer:
            return dict(deserializer)
