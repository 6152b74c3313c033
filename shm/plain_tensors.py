"""The short way to a tensor's bytes, for a plain, contiguous tensor on the host. tensors.py has the way of all others.

Owns: the choice of the way, and the watch over the memory that is read. Does not own: the messages about tensors that
no payload can hold (tensors.py).

Invariants: a tensor that is read is left as it was; its memory is not read by `Tensor.numpy()` (tensors.py says why).
Memory is read only while its storage still has the address that was found.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np

from ..errors import UnsupportedLeaf
from .dtypes import COPIED_AS, DType, dtype_named, name_of_torch
from .tensors import tensor_source

Array = np.ndarray[Any, Any]

Watch: TypeAlias = tuple[Callable[[], int], int, Callable[[], None]]
"""The address of a storage now, the address that was found, and what raises UnsupportedLeaf if they differ."""
TensorLeaf: TypeAlias = tuple[str, Array, Watch | None]
"""The name of a dtype, an array over the elements, and the watch over them."""

_dtypes: Final[dict[Any, tuple[str, DType]]] = {}
"""By torch dtype: its name, and the dtype as which it is copied."""


class _Memory:
    """Presents an address as an array. The array keeps the storage alive."""

    __slots__ = ("__array_interface__", "storage")
    __array_interface__: dict[str, Any]
    storage: Any


def tensor_leaf(torch: ModuleType, tensor: Any, where: Callable[[], str]) -> TensorLeaf:
    """A tensor as the leaf of a payload. `where` tells its place in the tree, for errors.

    A plain tensor costs eight calls.

    Raises:
        UnsupportedLeaf: no leaf can have its dtype, or the tensor has no plain memory.
    """
    kind = type(tensor)
    if (
        (kind is not torch.Tensor and kind is not torch.nn.Parameter)
        or not tensor.is_cpu
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.dtype not in _dtypes
        or not tensor.is_contiguous()
        or tensor.is_neg()
        or (tensor.dtype.is_complex and tensor.is_conj())
    ):
        return _any_leaf(torch, tensor, where)
    try:
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr
        address = pointer()
    except RuntimeError:
        return _any_leaf(torch, tensor, where)
    name, dtype = _dtypes[tensor.dtype]
    size_bytes = tensor.nbytes
    start = tensor.storage_offset() * dtype.itemsize
    if not size_bytes or not address or storage.nbytes() < start + size_bytes:
        return _any_leaf(torch, tensor, where)
    memory = _Memory()
    memory.storage = storage
    memory.__array_interface__ = {
        "data": (address + start, False),
        "shape": tensor.shape,
        "typestr": dtype.str,
        "version": 3,
    }
    # A shorter storage is another allocation, so its address tells that it was cut, too.
    gone = partial(_gone, storage, address, start + size_bytes, where)
    return name, np.asarray(memory), (pointer, address, gone)


def _any_leaf(torch: ModuleType, tensor: Any, where: Callable[[], str]) -> TensorLeaf:
    name, array, check = tensor_source(torch, tensor, where())
    if tensor.dtype not in _dtypes and name_of_torch(torch, tensor.dtype) == name:
        dtype = dtype_named(name)
        assert dtype is not None, name
        _dtypes[tensor.dtype] = name, COPIED_AS.get(dtype, dtype)
    return name, array, None if check is None else (partial(_checked, check), 0, check)


def _checked(check: Callable[[], None]) -> int:
    check()
    return 0


def _gone(storage: Any, address: int, needed_bytes: int, where: Callable[[], str]) -> NoReturn:
    found_bytes = storage.nbytes() if storage.data_ptr() else 0
    found = f"has {found_bytes}" if found_bytes < needed_bytes else "was allocated anew meanwhile"
    raise UnsupportedLeaf(
        f"{where()} is a torch tensor that needs {needed_bytes} bytes of its storage, which {found}: its memory was "
        "freed or cut, as FSDP does; pass it while its memory is there (within summon_full_params, or after unshard), "
        "or pass a copy"
    )
