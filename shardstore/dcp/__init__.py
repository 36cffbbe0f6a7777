"""torch.distributed.checkpoint (DCP) over our checkpoints: a storage writer and reader for `dcp.save` and `dcp.load`.

Source of the protocol: `torch/distributed/checkpoint/storage.py`, `planner.py` and `metadata.py` of torch 2.13; only
what its documentation names is used. `docs/dcp.md` says what is mapped.
"""

from __future__ import annotations

from shardstore.dcp.reader import Reader
from shardstore.dcp.writer import Writer

__all__ = ["Reader", "Writer"]
