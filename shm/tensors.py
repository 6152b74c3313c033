"""Conversion of torch tensors to arrays, for puts, and of arrays to tensors, for reads. The only module of shm that
uses torch.

Owns: the steps before a tensor's bytes can be read: copy from its device, resolve lazy views, check that its storage
has them. Does not own: the choice to import torch. Encoding never imports it, since a tensor exists only if torch is
loaded.

Invariants: a tensor made here either owns its memory (`tensor_copy`) or keeps the array under it alive (`tensor_over`).
A tensor that is read here is left as it was. So its memory is not read by `Tensor.numpy()`, after which torch resizes
the tensor's storage no more, as FSDP does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any, Final

import numpy as np

from ..errors import UnsupportedLeaf, UsageError
from .dtypes import COPIED_AS, DType, dtype_named, name_of, name_of_torch, torch_dtype_named

Array = np.ndarray[Any, Any]
_WITHOUT_VALUES: Final = "which has no values yet; pass it outside of torch.compile, torch.export and FakeTensorMode"
_REMEDIES: Final = {
    "FakeTensor": _WITHOUT_VALUES,
    "FunctionalTensor": _WITHOUT_VALUES,
    "NestedTensor": "several tensors in one; pass x.unbind(), or x.to_padded_tensor(0)",
}
"""By the class of a tensor."""


class TensorMemory:
    """The memory of a tensor's elements. The process may free or cut it at any moment, and go on using the tensor.

    Raises:
        UnsupportedLeaf: the tensor has no storage, or as `check`.
    """

    __slots__ = ("__array_interface__", "_address", "_needed_bytes", "_path", "_storage")

    def __init__(self, tensor: Any, path: str) -> None:
        # The number of elements from the storage's start to the tensor's last one.
        reach = tensor.numel()
        if reach:
            if not tensor.is_contiguous():
                sizes = zip(tensor.shape, tensor.stride(), strict=True)
                reach = 1 + sum([(length - 1) * step for length, step in sizes])
            reach += tensor.storage_offset()
        self._needed_bytes = reach * tensor.element_size()
        self._path = path
        try:
            # Of this one the memory is read, also if the tensor gets another storage meanwhile.
            self._storage = tensor.untyped_storage()
            self._address = self._storage.data_ptr()
        except RuntimeError as error:
            raise UnsupportedLeaf(
                f"{path} is a torch tensor without a storage ({error}), as within torch.func.vmap, grad, jvp and "
                "functionalize; pass what the transformed function returns"
            ) from None
        self.check()

    def check(self) -> None:
        """
        Raises:
            UnsupportedLeaf: the storage does not have all elements any more.
        """
        address = self._storage.data_ptr()
        found_bytes = self._storage.nbytes() if address else 0
        if not self._needed_bytes or (found_bytes >= self._needed_bytes and address == self._address):
            return
        found = f"has {found_bytes}" if found_bytes < self._needed_bytes else "was allocated anew meanwhile"
        raise UnsupportedLeaf(
            f"{self._path} is a torch tensor that needs {self._needed_bytes} bytes of its storage, which {found}: its "
            "memory was freed or cut, as FSDP does; pass it while its memory is there (within summon_full_params, or "
            "after unshard), or pass a copy"
        )

    def array(self, tensor: Any, dtype: DType) -> Array:
        """The elements of the tensor as an array, with any strides. The array keeps the storage alive."""
        if not self._needed_bytes:
            return np.empty(tensor.shape, dtype)
        step_bytes = dtype.itemsize
        interface = {
            "data": (self._address + tensor.storage_offset() * step_bytes, False),
            "shape": tensor.shape,
            "typestr": dtype.str,
            "version": 3,
        }
        if not tensor.is_contiguous():
            interface["strides"] = tuple([step * step_bytes for step in tensor.stride()])
        self.__array_interface__ = interface
        return np.asarray(self)


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


def tensor_source(torch: ModuleType, tensor: Any, path: str) -> tuple[str, Array, Callable[[], None] | None]:
    """A tensor's dtype name; an array over its memory, with any strides; and a function that raises UnsupportedLeaf if
    the process has freed this memory, None if it cannot. A tensor on a device is copied to the host.

    Raises:
        UnsupportedLeaf: the tensor's dtype has no name in the table, or the tensor has no plain memory.
    """
    name = _name_of(torch, tensor, path)
    dtype = dtype_named(name)
    assert dtype is not None, name
    given = tensor
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        check_memory(tensor, path)
        try:
            tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        except AssertionError as error:
            raise UnsupportedLeaf(f"{path} is a torch tensor that FakeTensorMode does not copy: {error}") from None
    memory = TensorMemory(tensor, path)
    return name, memory.array(tensor, COPIED_AS.get(dtype, dtype)), memory.check if tensor is given else None


def bytes_of(tensor: Any, path: str) -> Array:
    """A tensor's bytes in C order, (n,) uint8. Over its own memory if they lie there in this order, else a copy. The
    tensor may have any dtype.

    Raises:
        UnsupportedLeaf: its storage does not have all of its elements.
    """
    torch = loaded_torch()
    assert torch is not None, "there is a tensor"
    check_memory(tensor, path)
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    return TensorMemory(flat, path).array(flat, np.dtype(np.uint8))


def check_tensor(leaf: Any, path: str) -> None:
    """Checks that a leaf, if it is a tensor, has plain memory with all of its elements, on any device that tells.
    Subclasses of torch.Tensor with values are left to `tensor_source`.

    Raises:
        UnsupportedLeaf: it has not, as for `tensor_source`.
    """
    torch = loaded_torch()
    if torch is not None and (
        type(leaf) in (torch.Tensor, torch.nn.Parameter)
        or (isinstance(leaf, torch.Tensor) and type(leaf).__name__ in _REMEDIES)
    ):
        _name_of(torch, leaf, path)
        check_memory(leaf, path)


def check_memory(tensor: Any, path: str) -> None:
    """Checks that a tensor's storage has all of its elements, on any device that tells.

    Raises:
        UnsupportedLeaf: it has not.
    """
    if tensor.device.type == "cpu":
        TensorMemory(tensor, path)
        return
    with suppress(RuntimeError):
        # Tensors on devices of other libraries may have no storage. Their copies on the host have one.
        tensor.untyped_storage().data_ptr()
        TensorMemory(tensor, path)


def _name_of(torch: ModuleType, tensor: Any, path: str) -> str:
    """The name of a tensor's dtype.

    Raises: as `tensor_source`, but does not look at the tensor's memory.
    """
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        remedy = _REMEDIES.get(
            kind.__name__,
            "a subclass of torch.Tensor that would not come back as one; pass x.as_subclass(torch.Tensor), or its "
            "local part",
        )
        raise UnsupportedLeaf(f"{path} is a {kind.__module__}.{kind.__qualname__}, {remedy}")
    if tensor.is_nested:
        raise UnsupportedLeaf(f"{path} is a nested torch tensor, {_REMEDIES['NestedTensor']}")
    name = name_of_torch(torch, tensor.dtype)
    if name is None:
        instead = "x.dequantize(), or x.int_repr()" if tensor.is_quantized else "x.view(torch.uint8)"
        raise UnsupportedLeaf(
            f"{path} is a torch tensor of dtype {tensor.dtype}, which no leaf can have; "
            f"pass {instead}, or another plain dtype"
        )
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise UnsupportedLeaf(
            f"{path} is a torch tensor with layout {tensor.layout} on {tensor.device}, without "
            "plain memory; pass x.to_dense(), or a tensor with values"
        )
    return name


def tensor_copy(torch: ModuleType, array: Array) -> Any:
    """A new CPU tensor with the values of `array`, in native byte order."""
    native = array.dtype.newbyteorder("=")
    tensor = torch.empty(array.shape, dtype=_torch_dtype(torch, name_of(native)), device="cpu")
    moved_as = COPIED_AS.get(array.dtype)
    memory = TensorMemory(tensor, "the copy").array(tensor, native if moved_as is None else moved_as)
    np.copyto(memory, array if moved_as is None else array.view(moved_as))
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
