"""Conversion of torch tensors to arrays, for puts, and of arrays to tensors, for reads. The only module of shm that
uses torch.

Encoding never imports torch, since a tensor exists only if torch is loaded.

Invariants: a tensor made here either owns its memory (`tensor_copy`) or keeps the array under it alive (`tensor_over`).
A tensor that is read here is left as it was. So its memory is not read by `Tensor.numpy()`, after which torch resizes
the tensor's storage no more, as FSDP does. Memory is read only while its storage still has the address that was found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np

from ...errors import UnsupportedLeaf, UsageError
from .dtypes import COPIED_AS, DType, dtype_named, name_of, name_of_torch, torch_dtype_named

Array = np.ndarray[Any, Any]
_WITHOUT_VALUES: Final = "which has no values yet; pass it outside of torch.compile, torch.export and FakeTensorMode"
_REMEDIES: Final = {
    "FakeTensor": _WITHOUT_VALUES,
    "FunctionalTensor": _WITHOUT_VALUES,
    "NestedTensor": "several tensors in one; pass x.unbind(), or x.to_padded_tensor(0)",
}
"""By the class of a tensor."""
_OF_A_SUBCLASS: Final = (
    "a subclass of torch.Tensor that would not come back as one; pass x.as_subclass(torch.Tensor), or its local part"
)

Watch: TypeAlias = tuple[Callable[[], int], int, Callable[[], NoReturn]]
"""The address of a storage now, the address that was found, and what raises UnsupportedLeaf if they differ."""
TensorLeaf: TypeAlias = tuple[str, Array, Watch | None]
"""The name of a dtype, an array over the elements, and the watch over them; None if nobody else has them."""

_dtypes: Final[dict[Any, tuple[str, DType]]] = {}
"""By torch dtype: its name, and the dtype as which it is copied."""


class _Memory:
    """Presents an address as an array. The array keeps `held` alive."""

    __slots__ = ("__array_interface__", "held")
    __array_interface__: dict[str, Any]
    held: Any


def loaded_torch() -> ModuleType | None:
    """The torch module if this process has loaded it completely, else None."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "nn") else None


def needed_torch(call: str) -> ModuleType:
    """The torch module, imported for `call`. Raises UsageError if it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise UsageError(
            f"{call} needs torch, which this Python cannot import: install torch, or take the numpy views of lease.tree"
        ) from error
    return torch


def tensor_leaf(torch: ModuleType, tensor: Any, where: Callable[[], str]) -> TensorLeaf:
    """A tensor as the leaf of a payload. `where` tells its place in the tree, for errors. A tensor on a device is
    copied to the host. A plain tensor costs nine calls. Raises UnsupportedLeaf: no leaf can have its dtype, or the
    tensor has no plain memory."""
    given, kind = tensor, type(tensor)
    if (
        (kind is not torch.Tensor and kind is not torch.nn.Parameter)
        or not tensor.is_cpu
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.dtype not in _dtypes
        or tensor.is_neg()
        or (tensor.dtype.is_complex and tensor.is_conj())
    ):
        tensor = _made_plain(torch, tensor, where)
    name, dtype = _dtypes[tensor.dtype]
    try:
        # Of this storage the memory is read, also if the tensor gets another one meanwhile.
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr
        address = pointer()
    except RuntimeError as error:
        raise _without_storage(where(), error) from None
    needed_bytes = tensor.nbytes
    if not needed_bytes:
        return name, np.empty(tensor.shape, dtype), None
    step_bytes = dtype.itemsize
    start = tensor.storage_offset() * step_bytes
    interface = {"data": (address + start, False), "shape": tensor.shape, "typestr": dtype.str, "version": 3}
    if not tensor.is_contiguous():
        interface["strides"] = strides = tuple([step * step_bytes for step in tensor.stride()])
        sizes = zip(tensor.shape, strides, strict=True)
        needed_bytes = step_bytes + sum([(length - 1) * step for length, step in sizes])
    # A shorter storage is another allocation, so its address tells that it was cut, too.
    gone = partial(_gone, storage, address, start + needed_bytes, where)
    if not address or storage.nbytes() < start + needed_bytes:
        gone()
    memory = _Memory()
    memory.held, memory.__array_interface__ = storage, interface
    # The process may free or cut the storage at any moment, and go on using the tensor: so there is a watch over it.
    return name, np.asarray(memory), (pointer, address, gone) if tensor is given else None


def _made_plain(torch: ModuleType, tensor: Any, where: Callable[[], str]) -> Any:
    """The tensor on the host, with its values as they are in memory. Its dtype is in `_dtypes` from now on."""
    name = _name_of(torch, tensor, where())
    dtype = dtype_named(name)
    assert dtype is not None, name
    _dtypes[tensor.dtype] = name, COPIED_AS.get(dtype, dtype)
    if tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    check_memory(tensor, where())
    try:
        return tensor.detach().cpu().resolve_conj().resolve_neg()
    except AssertionError as error:
        raise UnsupportedLeaf(f"{where()} is a torch tensor that FakeTensorMode does not copy: {error}") from None


def _without_storage(path: str, error: RuntimeError) -> UnsupportedLeaf:
    return UnsupportedLeaf(
        f"{path} is a torch tensor without a storage ({error}), as within torch.func.vmap, grad, jvp and "
        "functionalize; pass what the transformed function returns"
    )


def _gone(storage: Any, address: int, needed_bytes: int, where: Callable[[], str]) -> NoReturn:
    found_bytes = storage.nbytes() if storage.data_ptr() else 0
    found = f"has {found_bytes}" if found_bytes < needed_bytes else "was allocated anew meanwhile"
    raise UnsupportedLeaf(
        f"{where()} is a torch tensor that needs {needed_bytes} bytes of its storage, which {found}: its memory was "
        "freed or cut, as FSDP does; pass it while its memory is there (within summon_full_params, or after unshard), "
        "or pass a copy"
    )


def bytes_of(tensor: Any, path: str) -> Array:
    """A tensor's bytes in C order, (n,) uint8, of any dtype. Over its own memory if they lie there in this order, else
    a copy. Raises as `check_memory`."""
    torch = loaded_torch()
    assert torch is not None, "there is a tensor"
    check_memory(tensor, path)
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    return tensor_leaf(torch, flat, lambda: path)[1]


def check_tensor(leaf: Any, path: str) -> None:
    """Raises as `tensor_leaf` if a leaf is a tensor without plain memory for all of its elements, on any device that
    tells. Subclasses of torch.Tensor with values are left to `tensor_leaf`."""
    torch = loaded_torch()
    if torch is not None and (
        type(leaf) in (torch.Tensor, torch.nn.Parameter)
        or (isinstance(leaf, torch.Tensor) and type(leaf).__name__ in _REMEDIES)
    ):
        _name_of(torch, leaf, path)
        check_memory(leaf, path)


def check_memory(tensor: Any, path: str) -> None:
    """Raises UnsupportedLeaf unless a tensor's storage has all of its elements, on any device that tells."""
    try:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
    except RuntimeError as error:
        if tensor.device.type == "cpu":
            raise _without_storage(path, error) from None
        # Tensors on devices of other libraries may have no storage. Their copies on the host have one.
        return
    if not tensor.numel():
        return
    last = sum([(length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True)])
    needed_bytes = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if not address or storage.nbytes() < needed_bytes:
        _gone(storage, address, needed_bytes, lambda: path)


def _name_of(torch: ModuleType, tensor: Any, path: str) -> str:
    """The name of a tensor's dtype. Raises as `tensor_leaf`, but does not look at the tensor's memory."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        remedy = _REMEDIES.get(kind.__name__, _OF_A_SUBCLASS)
        raise UnsupportedLeaf(f"{path} is a {kind.__module__}.{kind.__qualname__}, {remedy}")
    if tensor.is_nested:
        raise UnsupportedLeaf(f"{path} is a nested torch tensor, {_REMEDIES['NestedTensor']}")
    name = name_of_torch(torch, tensor.dtype)
    if name is None:
        instead = "x.dequantize(), or x.int_repr()" if tensor.is_quantized else "x.view(torch.uint8)"
        what = f"{path} is a torch tensor of dtype {tensor.dtype}, which no leaf can have"
        raise UnsupportedLeaf(f"{what}; pass {instead}, or another plain dtype")
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        what = f"{path} is a torch tensor with layout {tensor.layout} on {tensor.device}, without plain memory"
        raise UnsupportedLeaf(f"{what}; pass x.to_dense(), or a tensor with values")
    return name


def tensor_copy(torch: ModuleType, array: Array) -> Any:
    """A new CPU tensor with the values of `array`, in native byte order."""
    native = array.dtype.newbyteorder("=")
    tensor = torch.empty(array.shape, dtype=_torch_dtype(torch, name_of(native)), device="cpu")
    moved_as = COPIED_AS.get(array.dtype)
    _, memory, _ = tensor_leaf(torch, tensor, lambda: "the copy")
    np.copyto(memory, array if moved_as is None else array.view(moved_as))
    return tensor


def tensor_over(torch: ModuleType, array: Array) -> Any:
    """A CPU tensor over the memory of `array`, which it keeps alive. Torch does not prevent writes to it, even if
    `array` is read-only."""
    dtype = _torch_dtype(torch, name_of(array.dtype))
    moved_as = COPIED_AS.get(array.dtype)
    plain = array if moved_as is None else array.view(moved_as)
    if not plain.flags.writeable:
        # Torch warns about every read-only array.
        memory, interface = _Memory(), plain.__array_interface__
        interface["data"] = (interface["data"][0], False)
        memory.held, memory.__array_interface__ = plain, interface
        plain = np.asarray(memory)
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
