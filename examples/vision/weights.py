"""Reads a PyTorch checkpoint into numpy, without torch and without trusting its pickle.

Owns: the file format of torch before 1.6: three pickled preambles, one pickled state dict whose storages have
persistent ids, the list of those ids, then the bytes of each storage. Does not own: the meaning of the weights.

Invariant: the unpickler calls only the four names in `_ALLOWED`. It refuses any other name before the call, and no
tensor reaches outside its storage.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_PROTOCOL: Final = 1001
_STORAGE_ELEMENTS_MAX: Final = 1 << 28


class UnsafeCheckpoint(ValueError):
    """The file asks for more than tensors, or describes them wrongly."""


class _Storage:
    """One storage. Its bytes follow the pickles, so its elements are filled in later."""

    def __init__(self, dtype: np.dtype[Any], elements: int) -> None:
        if not 0 <= elements <= _STORAGE_ELEMENTS_MAX:
            raise UnsafeCheckpoint(f"storage of {elements} elements; the limit is {_STORAGE_ELEMENTS_MAX}")
        self.values = np.zeros(elements, dtype)


def _rebuild_tensor(
    storage: object,
    offset: int,
    shape: Any,
    strides: Any,
    requires_grad: bool,
    hooks: object,
) -> Array:
    """The view that torch's `_rebuild_tensor_v2` describes; `strides` count elements."""
    if not isinstance(storage, _Storage):
        raise UnsafeCheckpoint(f"a tensor over {type(storage).__name__}, which is not a storage")
    if hooks:
        raise UnsafeCheckpoint("a tensor with backward hooks")
    if not (isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides)):
        raise UnsafeCheckpoint(f"a tensor with shape {shape!r} and strides {strides!r}")
    if not all(isinstance(n, int) and n >= 0 for n in (offset, *shape, *strides)):
        raise UnsafeCheckpoint(f"a tensor at {offset!r} with shape {shape!r} and strides {strides!r}")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if math.prod(shape) and last >= len(storage.values):
        raise UnsafeCheckpoint(f"a tensor that ends at element {last} of a storage of {len(storage.values)}")
    size = storage.values.itemsize
    return np.lib.stride_tricks.as_strided(
        storage.values[offset:], shape, tuple(step * size for step in strides), writeable=False
    )


_ALLOWED: Final[Mapping[tuple[str, str], object]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    # A persistent id only names the storage's type: the dtype stands for it.
    ("torch", "FloatStorage"): np.dtype("<f4"),
    ("torch", "LongStorage"): np.dtype("<i8"),
}


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storages: dict[str, _Storage] | None) -> None:
        super().__init__(file, encoding="utf-8")
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name)) if self._storages is not None else None
        if found is None:
            raise UnsafeCheckpoint(f"the file asks for {module}.{name}, which no tensor needs")
        return found

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", np.dtype() as dtype, str(key), str(), int(elements), None) if self._storages is not None:
                if key not in self._storages:
                    self._storages[key] = _Storage(dtype, elements)
                return self._storages[key]
        raise UnsafeCheckpoint(f"the file refers to {pid!r}, which is not a storage")


def _load(file: io.BytesIO, storages: dict[str, _Storage] | None = None) -> Any:
    try:
        return _TensorUnpickler(file, storages).load()
    except UnsafeCheckpoint:
        raise
    except Exception as error:  # a broken pickle may raise any exception
        raise UnsafeCheckpoint(f"not a readable checkpoint: {error!r}") from error


def _expect(read: Callable[[], Any], wanted: object, what: str) -> None:
    if (found := read()) != wanted:
        raise UnsafeCheckpoint(f"{what} is {found!r}; only {wanted!r} is read")


def _truncated() -> NoReturn:
    raise UnsafeCheckpoint("the file ends within a storage, or has a wrong length for one")


def read_checkpoint(path: Path) -> tuple[dict[str, Array], str]:
    """The tensors of `path` by name (read-only, float32 or int64), and the SHA-256 of the file as hex.

    Raises UnsafeCheckpoint for a file that is not the state dict of a model, and OSError for a file that cannot be
    read.
    """
    content = path.read_bytes()
    file = io.BytesIO(content)
    _expect(lambda: _load(file), _MAGIC, "the magic number")
    _expect(lambda: _load(file), _PROTOCOL, "the protocol version")
    _expect(lambda: dict(_load(file)).get("little_endian"), True, "little_endian")
    storages: dict[str, _Storage] = {}
    state = _load(file, storages)
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, np.ndarray) for name, value in state.items()
    ):
        raise UnsafeCheckpoint("the file is not a dict of tensors by name")
    keys = _load(file)
    if not isinstance(keys, list) or sorted(keys) != sorted(storages):
        raise UnsafeCheckpoint("the storages in the file differ from those of its tensors")
    for key in keys:
        values = storages[key].values
        (elements,) = struct.unpack("<q", file.read(8).ljust(8, b"\xff"))
        if elements != len(values):
            _truncated()
        if file.readinto(values.view(np.uint8).data) != values.nbytes:
            _truncated()
    return dict(state), hashlib.sha256(content).hexdigest()
