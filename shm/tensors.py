"""Torch tensors as leaves: into arrays to copy from, and out of arrays again. The only module of
shm that knows torch.

Owns: what must be done to a tensor before its bytes can be read (detach, fetch from its device,
resolve lazy views). Torch is never imported to encode: a tensor can only exist once its owner has.

Invariant: a tensor made here either owns its memory (`tensor_copy`) or keeps the array it lies over
alive (`tensor_over`).
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np

from ..errors import UnsupportedLeaf
from .dtypes import COPIED_AS, dtype_named, name_of, name_of_torch, torch_dtype_named

Array = np.ndarray[Any, Any]


class _Writable:
    """The memory of a read-only array, offered as writable, because torch warns of every read-only
    array it takes."""

    __slots__ = ("__array_interface__", "array")

    def __init__(self, array: Array) -> None:
        interface = array.__array_interface__
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.array = array


def loaded_torch() -> ModuleType | None:
    """Torch, if this process has it loaded whole."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "nn") else None


def tensor_source(torch: ModuleType, tensor: Any, path: str) -> tuple[str, Array]:
    """A tensor's dtype name, and an array over (or, from a device, copied from) its memory, of any
    strides.

    Raises:
        UnsupportedLeaf: a tensor without plain memory of a dtype in the table.
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
    """A new tensor on the CPU with the values of `array`, whatever its byte order."""
    native = array.dtype.newbyteorder("=")
    tensor = torch.empty(array.shape, dtype=_torch_dtype(torch, name_of(native)), device="cpu")
    moved_as = COPIED_AS.get(array.dtype)
    if moved_as is None:
        np.copyto(tensor.numpy(), array)
    else:
        np.copyto(tensor.view(_torch_dtype(torch, moved_as.str)).numpy(), array.view(moved_as))
    return tensor


def tensor_over(torch: ModuleType, array: Array) -> Any:
    """A tensor over the memory of `array`, which it keeps alive.

    Torch will not keep it from being written, even where `array` is read-only.
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
