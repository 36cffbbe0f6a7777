"""Started as one of several processes: saves tensors that are cut along several dimensions by `dcp.save`."""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def whole() -> dict[str, torch.Tensor]:
    """The tensors, not cut."""
    return {
        "rows": torch.arange(35.0).view(7, 5),
        "columns": torch.arange(21, dtype=torch.int64).view(3, 7),
        "one row": torch.arange(4).bfloat16().view(1, 4),  # the second rank has nothing of it
        "copied": torch.arange(6.0),
    }


def main() -> None:
    """Arguments: rank, ranks, the file by which they find each other, the folder to save to."""
    rank, ranks, meeting, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    cuts = {"rows": Shard(0), "columns": Shard(1), "one row": Shard(0), "copied": Replicate()}
    state = {name: distribute_tensor(tensor, mesh, [cuts[name]]) for name, tensor in whole().items()}
    dcp.save({"model": state, "step": 3}, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
