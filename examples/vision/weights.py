"""Reads the state dict of a PyTorch checkpoint into numpy, without torch.

Owns: the file format of torch before 1.6: three pickled preambles, one pickled state dict whose storages have
persistent ids, the list of those ids, then the bytes of each storage. Does not own: the meaning of the weights.

Invariant: the unpickler knows only the names in `_NAMES`, so that nothing else of a file is called.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_MAGIC: Final = 0x1950A86A20F9469CFC6C


def _tensor(storage: Array, offset: int, shape: Any, strides: Any, *_: object) -> Array:
    """The view that torch's `_rebuild_tensor_v2` describes; `strides` count elements."""
    size = storage.itemsize
    return np.ndarray(shape, storage.dtype, storage, offset * size, tuple(step * size for step in strides))


_NAMES: Final[Mapping[tuple[str, str], object]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    # A persistent id only names the storage's type: the dtype stands for it.
    ("torch", "FloatStorage"): np.dtype("<f4"),
    ("torch", "LongStorage"): np.dtype("<i8"),
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="utf-8")
        self.storages: dict[str, Array] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"the file asks for {module}.{name}, which no tensor needs")
        return _NAMES[module, name]

    def persistent_load(self, pid: Any) -> Array:
        # The bytes follow the pickles, so the elements are filled in later.
        _, dtype, key, _, elements, _ = pid
        return self.storages.setdefault(key, np.zeros(elements, dtype))


def read_checkpoint(path: Path) -> tuple[dict[str, Array], str]:
    """The tensors of `path` by name (float32 or int64), and the SHA-256 of the file as hex.

    Raises:
        OSError, ValueError, pickle.UnpicklingError: the file cannot be read, or is not the state dict of a model.
    """
    content = path.read_bytes()
    file = io.BytesIO(content)
    magic, _, _ = (_Unpickler(file).load() for _ in range(3))
    if magic != _MAGIC:
        raise ValueError(f"{path} is no checkpoint of torch before 1.6")
    reader = _Unpickler(file)
    state = reader.load()
    for key in _Unpickler(file).load():
        file.seek(8, io.SEEK_CUR)  # the number of its elements
        file.readinto(reader.storages[key].view(np.uint8).data)
    return dict(state), hashlib.sha256(content).hexdigest()
