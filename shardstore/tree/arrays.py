"""numpy arrays as tensors, and sparse tensors as their parts."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from shardstore.tree.scalars import BadNode, numpy_dtype, numpy_text

_COMPRESSED = {
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
}
PARTS: dict[str, tuple[str, ...]] = {"sparse_coo": ("indices", "values"), **_COMPRESSED}
"""Layout -> the names of its parts."""


def layout_of(tensor: torch.Tensor) -> str:
    """`sparse_coo` and so on."""
    return str(tensor.layout)[len("torch.") :]


def sparse_parts(tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """The strided tensors that a sparse one is made of, in the same memory; None if it isn't sparse."""
    if tensor.layout is torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
        return None
    bare, layout = tensor.detach(), layout_of(tensor)
    if layout == "sparse_coo":
        return {"indices": bare._indices(), "values": bare._values()}  # noqa: SLF001 - the public ones want a coalesced tensor
    return {name: getattr(bare, name)() for name in PARTS[layout]} if layout in PARTS else None


def sparse_node(tensor: torch.Tensor) -> dict[str, Any]:
    """The skeleton of a sparse tensor, without its parts."""
    node: dict[str, Any] = {"$": "sparse", "layout": layout_of(tensor), "shape": list(tensor.shape), "parts": {}}
    if tensor.layout is torch.sparse_coo:
        node["coalesced"] = tensor.is_coalesced()
    return node


def to_sparse(node: dict[str, Any], parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """A sparse tensor from its parts; BadNode if they don't fit together."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "is in beta state", once a process
            if node["layout"] == "sparse_coo":
                return torch.sparse_coo_tensor(
                    parts["indices"],
                    parts["values"],
                    node["shape"],
                    is_coalesced=node["coalesced"],
                    device=parts["values"].device,
                    check_invariants=True,
                )
            compressed, plain, values = (parts[name] for name in PARTS[node["layout"]])
            return torch.sparse_compressed_tensor(
                compressed,
                plain,
                values,
                node["shape"],
                layout=getattr(torch, node["layout"]),
                check_invariants=True,
                device=values.device,
            )
    except (RuntimeError, TypeError, ValueError) as error:
        raise BadNode(f"the parts of a sparse tensor don't fit: {str(error)[:200]}") from None


def from_numpy(array: np.ndarray[Any, Any]) -> tuple[torch.Tensor, str]:
    """An array as a little-endian tensor in C order, without a copy where possible, and its dtype's text."""
    text = numpy_text(array.dtype, array=True)
    little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    if little.dtype.kind in "mM":
        little = little.view("<i8")
    if min(little.strides, default=0) < 0:
        little = little.copy()  # over sizes of 0 or 1 numpy lets it pass for C order, torch does not
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a read-only array: we only read as well
        return torch.from_numpy(little), text


def to_numpy(tensor: torch.Tensor, text: str) -> np.ndarray[Any, Any]:
    """The array that a tensor stands for, in the tensor's memory where that is possible; BadNode if it can't be."""
    dtype = numpy_dtype(text, array=True)
    array = tensor.detach().cpu().numpy()
    stored = np.dtype("<i8") if dtype.kind in "mM" else dtype.newbyteorder("<")
    if array.dtype != stored:
        raise BadNode(f"an array of {dtype} is stored as {array.dtype}")
    if dtype.kind in "mM":
        array = array.view(dtype.newbyteorder("<"))
    return array.astype(dtype, copy=False)
