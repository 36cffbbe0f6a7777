"""The same training through torch.distributed.checkpoint: code that was written for it, with our writer and reader.

    torchrun --nproc-per-node 2 examples/fsdp_dcp.py     # trains 10 steps and saves with dcp.save
    torchrun --nproc-per-node 3 examples/fsdp_dcp.py     # dcp.load into 3 ranks, 10 steps more
    python examples/fsdp_dcp.py                          # and one plain process goes on from there

What lies there is a checkpoint of ours: `shardstore verify dcp-checkpoint` reads every byte of it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp import STEPS, build, checksum, say, train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from shardstore.dcp import Reader, Writer


def taken(state: dict[str, Any]) -> dict[str, Any]:
    """The state as DCP takes it: plain dicts by name."""
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    return {"model": model, "optimizer": optimizer, "step": state["step"]}


def main() -> None:
    """Load what is there, train, save."""
    url = sys.argv[1] if len(sys.argv) > 1 else "dcp-checkpoint"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    state = build()
    if os.path.exists(os.path.join(url, "shardstore.json")):
        loaded = taken(state)
        dcp.load(loaded, storage_reader=Reader(url))
        set_state_dict(
            state["model"], state["optimizer"], model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
        state["step"] = loaded["step"]
        say(f"loaded step {state['step']}, sum {checksum(state)}")
    else:
        say("nothing to load: training from the start")
    train(state, STEPS)
    dcp.save(taken(state), storage_writer=Writer(url, overwrite=True))
    say(f"saved step {state['step']}, sum {checksum(state)}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
