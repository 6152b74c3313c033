"""Conversion of torch tensors to arrays, for puts, and of arrays to tensors, for reads. The only module of shm that
uses torch.

Owns: the steps before a tensor's bytes can be read: detach, copy from its device, resolve lazy views. Does not own:
the choice to import torch. Encoding never imports it, since a tensor exists only if torch is loaded.

Invariants: a tensor made here either owns its memory (`tensor_copy`) or keeps the array under it alive (`tensor_over`).
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np

from ..errors import UnsupportedLeaf, UsageError
from .dtypes import COPIED_AS, dtype_named, name_of, name_of_torch, torch_dtype_named

Array = np.ndarray[Any, Any]


class _Writable:
    """Presents the memory of a read-only array as writable, because torch warns about every read-only array."""

    __slots__ = ("__array_interface__", "array")

    def __init__(self, array: Array) -> None:
        interface = array.__array_interface__
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.array = array


def loaded_torch() -> ModuleType | None:
    """The torch module if this process has loaded it completely, else None."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "nn") else None


def needed_torch(call: str) -> ModuleType:
    """The torch module, imported for `call`.

    Raises:
        UsageError: torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise UsageError(
            f"{call} needs torch, which this Python cannot import: install torch, or take the numpy views of lease.tree"
        ) from error
    return torch


def tensor_source(torch: ModuleType, tensor: Any, path: str) -> tuple[str, Array]:
    """A tensor's dtype name, and an array over its memory, with any strides. A tensor on a device is copied to the
    host.

    Raises:
        UnsupportedLeaf: the tensor's dtype has no name in the table, or the tensor has no plain memory.
    """
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        kind = type(tensor)
        raise UnsupportedLeaf(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, a subclass of torch.Tensor that "
            "would not come back as one; pass x.as_subclass(torch.Tensor), or its local part"
        )
    name = name_of_torch(torch, tensor.dtype)
    if name is None:
        raise UnsupportedLeaf(
            f"{path} is a torch tensor of dtype {tensor.dtype}, which no leaf can have; "
            "pass x.view(torch.uint8), or another plain dtype"
        )
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise UnsupportedLeaf(
            f"{path} is a torch tensor with layout {tensor.layout} on {tensor.device}, without "
            "plain memory; pass x.to_dense(), or a tensor with values"
        )
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    moved_as = COPIED_AS.get(dtype_named(name))
    if moved_as is not None:
        plain = plain.view(_torch_dtype(torch, moved_as.str))
    return name, plain.numpy()


def tensor_copy(torch: ModuleType, array: Array) -> Any:
    """A new CPU tensor with the values of `array`, in native byte order."""
    native = array.dtype.newbyteorder("=")
    tensor = torch.empty(array.shape, dtype=_torch_dtype(torch, name_of(native)), device="cpu")
    moved_as = COPIED_AS.get(array.dtype)
    if moved_as is None:
        np.copyto(tensor.numpy(), array)
    else:
        np.copyto(tensor.view(_torch_dtype(torch, moved_as.str)).numpy(), array.view(moved_as))
    return tensor


def tensor_over(torch: ModuleType, array: Array) -> Any:
    """A CPU tensor over the memory of `array`. The tensor keeps `array` alive.

    Torch does not prevent writes to the tensor, even if `array` is read-only.
    """
    dtype = _torch_dtype(torch, name_of(array.dtype))
    moved_as = COPIED_AS.get(array.dtype)
    plain = array if moved_as is None else array.view(moved_as)
    if not plain.flags.writeable:
        plain = np.asarray(_Writable(plain))
    tensor = torch.from_numpy(plain)
    return tensor if moved_as is None else tensor.view(dtype)


def _torch_dtype(torch: ModuleType, name: str | None) -> Any:
    dtype = torch_dtype_named(torch, name) if name else None
    if dtype is None:
        raise UnsupportedLeaf(
            f"torch {torch.__version__} has no dtype for {name!r}; take this leaf as a numpy view "
            "(where only the byte order differs, as a copy)"
        )
    return dtype
