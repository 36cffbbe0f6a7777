"""DTensors: this rank's part, where it lies in the whole, and who else holds it. No communication."""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import torch

from shardstore.mesh import Placement, Split, part_of, places_of
from shardstore.specs import Box, Shape
from shardstore.tree.state import Part
from shardstore.tree.tensors import class_name, refuse

_NOBODY = Part(Box((), ()), (), ())


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor; nothing is imported to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: Any) -> torch.Tensor:
    """This rank's own part of a DTensor: the very memory."""
    with torch.no_grad():
        local = tensor.to_local()
    made: torch.Tensor = local.wait() if hasattr(local, "wait") else local
    return made


Layouts: TypeAlias = dict[tuple[int, Any, Shape], tuple[Box, Box, Part, Any]]
"""By id of the mesh, placements and shape: the part by arithmetic, that which torch claims, what is made of it, and the
mesh: as long as it lives, no other has its id.

For one walk over a state: torch takes its time to describe each DTensor, and most are laid out alike.
"""


def part_held(tensor: Any, path: str, known: Layouts | None = None) -> Part:
    """Which part this rank holds. Raises UnsupportedState for what is not to be trusted or not finished.

    torch's own claim is compared with our arithmetic and with the shape of the local tensor: it is known to be wrong
    for some uneven layouts (pytorch issues 168134, 161368), and rows filed under a wrong place are lost.
    """
    known = {} if known is None else known
    shape = tuple(tensor.shape)
    layout = id(tensor.device_mesh), tensor.placements, shape
    if layout not in known:
        found = _laid_out(tensor, shape, path)
        if found is None:
            return _NOBODY
        known[layout] = found
    box, claimed, part, _ = known[layout]
    local = tuple(local_of(tensor).shape)
    if local != box.shape or not (claimed == box or not (claimed.volume or box.volume)):
        raise refuse(
            path,
            f"the layout {tensor.placements} of this DTensor of shape {shape} is in doubt: this rank holds {local}, "
            f"torch claims {claimed.shape} at {claimed.origin}, by arithmetic it is {box.shape} at {box.origin}; "
            "redistribute() it, or let its dimension divide evenly",
        )
    return part


def _laid_out(tensor: Any, shape: Shape, path: str) -> tuple[Box, Box, Part, Any] | None:
    """What `Layouts` has of a layout; None for a rank outside of the mesh."""
    mesh = tensor.device_mesh
    at = mesh.get_coordinate()
    if at is None:
        return None
    placements = [_placement(placement, path) for placement in tensor.placements]
    sizes = tuple(mesh.mesh.shape)
    try:
        box = part_of(shape, sizes, at, placements)
        claimed = _claimed(tensor, shape)
    except (ValueError, NotImplementedError) as error:
        raise refuse(path, f"the layout {tensor.placements} of this DTensor is not understood: {error}") from None
    part = Part(box, tuple(mesh.mesh.flatten().tolist()), places_of(sizes, at, placements))
    return box, claimed, part, mesh


def _placement(placement: Any, path: str) -> Placement:
    kind = type(placement).__name__
    if kind == "Replicate":
        return None
    if kind == "Shard":
        return Split(placement.dim)
    if kind == "_StridedShard":
        return Split(placement.dim, placement.split_factor)
    if placement.is_partial():
        raise refuse(
            path, "this DTensor is Partial, a sum that is not finished; redistribute() it to Shard or Replicate first"
        )
    raise refuse(path, f"the placement {class_name(placement)} of this DTensor is unknown; redistribute() it to Shard")


def _claimed(tensor: Any, shape: Shape) -> Box:
    """What torch says that this rank holds."""
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1:
        raise ValueError(f"it consists of {len(chunks)} chunks on this rank")
    origin, size = tuple(chunks[0].offsets), tuple(chunks[0].sizes)
    return Box(origin or (0,) * len(shape), size)


def like(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """A new DTensor with the layout of another one, of `dtype`; its values are not set."""
    local = torch.empty_like(local_of(tensor), dtype=dtype)
    kind = type(tensor.detach())
    made: torch.Tensor = kind.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return made
