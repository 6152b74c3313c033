"""What a user may rely on when a checkpoint is read without torch."""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vision.weights import UnsafeCheckpoint, read_checkpoint


class _Global:
    """Pickled as a bare reference to `module.name`."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class _Call:
    """Pickled as a call of `module.name` with `arguments`."""

    def __init__(self, module: str, name: str, *arguments: object) -> None:
        self.function, self.arguments = _Global(module, name), arguments


class _Storage:
    """Pickled as torch pickles a storage: by a persistent id."""

    def __init__(self, kind: str, key: str, elements: int) -> None:
        self.pid = ("storage", _Global("torch", kind), key, "cpu", elements, None)


_PythonPickler: Any = pickle._Pickler  # it can name what cannot be imported


class _Pickler(_PythonPickler):  # type: ignore[misc]
    def persistent_id(self, obj: object) -> object:
        return obj.pid if isinstance(obj, _Storage) else None

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, _Global):
            self.write(f"c{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, _Call):
            self.save(obj.function)
            self.save(obj.arguments)
            self.write(pickle.REDUCE)
        else:
            super().save(obj, save_persistent_id)


def _tensor(storage: _Storage, shape: tuple[int, ...], strides: tuple[int, ...], at: int = 0) -> _Call:
    return _Call("torch._utils", "_rebuild_tensor_v2", storage, at, shape, strides, False, OrderedDict())


def _write(
    path: Path,
    state: object,
    storages: dict[str, np.ndarray[Any, Any]],
    magic: int = 0x1950A86A20F9469CFC6C,
    protocol: int = 1001,
) -> Path:
    with path.open("wb") as file:
        for part in (magic, protocol, {"little_endian": True}, state, list(storages)):
            _Pickler(file, 2).dump(part)
        for values in storages.values():
            file.write(struct.pack("<q", values.size) + values.tobytes())
    return path


SIX = np.arange(6, dtype=np.float32)


def test_tensors_come_back_with_their_names_shapes_and_values(tmp_path: Path) -> None:
    floats, integer = _Storage("FloatStorage", "1", 6), _Storage("LongStorage", "2", 1)
    state = OrderedDict(
        plain=_tensor(floats, (2, 3), (3, 1)),
        transposed=_tensor(floats, (3, 2), (1, 3)),
        part=_tensor(floats, (2,), (1,), at=4),
        scalar=_tensor(integer, (), ()),
    )
    path = _write(tmp_path / "a.pth", state, {"1": SIX, "2": np.array([7], np.int64)})

    tensors, digest = read_checkpoint(path)

    assert list(tensors) == ["plain", "transposed", "part", "scalar"]
    np.testing.assert_array_equal(tensors["plain"], SIX.reshape(2, 3))
    np.testing.assert_array_equal(tensors["transposed"], SIX.reshape(2, 3).T)
    np.testing.assert_array_equal(tensors["part"], [4, 5])
    assert tensors["scalar"] == 7
    assert tensors["scalar"].dtype == np.int64
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match="read-only"):
        tensors["plain"][0, 0] = 1


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("torch", "load"),
        ("torch._utils", "_rebuild_parameter"),
        ("numpy", "load"),
    ],
)
def test_nothing_but_tensors_is_ever_called(tmp_path: Path, module: str, name: str) -> None:
    there = tmp_path / "there"
    call = _Call(module, name, f"touch {there}")
    path = _write(tmp_path / "a.pth", OrderedDict(x=call), {})

    with pytest.raises(UnsafeCheckpoint, match=f"{module}.{name}"):
        read_checkpoint(path)
    assert not there.exists()


@pytest.mark.parametrize(
    ("shape", "strides", "at"),
    [((7,), (1,), 0), ((6,), (1,), 1), ((2, 3), (4, 1), 0), ((2,), (-1,), 0), ((2,), (1, 1), 0)],
)
def test_a_tensor_never_reaches_outside_its_storage(
    tmp_path: Path, shape: tuple[int, ...], strides: tuple[int, ...], at: int
) -> None:
    tensor = _tensor(_Storage("FloatStorage", "1", 6), shape, strides, at)
    path = _write(tmp_path / "a.pth", OrderedDict(x=tensor), {"1": SIX})
    with pytest.raises(UnsafeCheckpoint, match="a tensor"):
        read_checkpoint(path)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    tensor = _tensor(_Storage("FloatStorage", "1", 6), (6,), (1,))
    whole = _write(tmp_path / "a.pth", OrderedDict(x=tensor), {"1": SIX}).read_bytes()
    cut = tmp_path / "cut.pth"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(UnsafeCheckpoint):
            read_checkpoint(cut)
