"""The dtypes that a leaf may have, and their names in a tree header.

Invariants: each name means one dtype and each dtype has one name, on every machine. A numpy dtype's name is its `str`
with the byte order ("<f4"). Dtypes that numpy has only through ml_dtypes have torch's name ("bfloat16",
"float8_e4m3fn"), since their `str` is ambiguous ("<V2", even "<f1").
"""

from __future__ import annotations

import re
from functools import cache
from types import ModuleType
from typing import Any, Final

import ml_dtypes
import numpy as np

DType = np.dtype[Any]

_PLAIN: Final = (
    *("|b1", "|i1", "|u1"),
    *(order + code for code in ("i2", "i4", "i8", "u2", "u4", "u8") for order in "<>"),
    *(order + code for code in ("f2", "f4", "f8", "c8", "c16") for order in "<>"),
    np.dtype(np.longdouble).str,
    np.dtype(np.clongdouble).str,
)
_FLOAT8: Final = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
_NARROW: Final = ("bfloat16", *(f"float8_{name}" for name in _FLOAT8))
_SIZED: Final = re.compile(
    r"(\|S|[<>]U)[1-9][0-9]{0,8}|[<>][Mm]8(\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)
_DTYPES: Final[dict[str, DType]] = {name: np.dtype(name) for name in _PLAIN} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in _NARROW if hasattr(ml_dtypes, name)
}
_NAMES: Final[dict[DType, str]] = {dtype: name for name, dtype in _DTYPES.items()}
_TORCH_NAMES: Final = {name: dtype.name for name, dtype in _DTYPES.items() if dtype.isnative}
"""Torch calls its dtypes as numpy does."""

# The integer dtype as which an ml_dtypes array is copied: numpy copies its own integers without the GIL, but a
# registered dtype with it.
COPIED_AS: Final[dict[DType | None, DType]] = {
    _DTYPES[name]: np.dtype(f"u{_DTYPES[name].itemsize}") for name in _NARROW if name in _DTYPES
}


def name_of(dtype: DType) -> str | None:
    """The header name of a numpy dtype; None if no leaf can have that dtype."""
    name = _NAMES.get(dtype)
    if name is None and dtype.type in (np.str_, np.bytes_, np.datetime64, np.timedelta64):
        return dtype.str if _SIZED.fullmatch(dtype.str) else None
    return name


def dtype_named(name: str) -> DType | None:
    """The numpy dtype of a header name; None for any name that `name_of` does not produce."""
    dtype = _DTYPES.get(name)
    if dtype is None and _SIZED.fullmatch(name):
        try:
            dtype = np.dtype(name)
        except (TypeError, ValueError, OverflowError):
            return None
        return dtype if dtype.str == name else None
    return dtype


def torch_dtype_named(torch: ModuleType, name: str) -> Any:
    """The torch dtype of a header name; None if this version of torch has none."""
    return getattr(torch, _TORCH_NAMES.get(name, ""), None)


@cache
def name_of_torch(torch: ModuleType, dtype: Any) -> str | None:
    """The header name of a torch dtype; None if no leaf can have that dtype."""
    return next((name for name in _TORCH_NAMES if torch_dtype_named(torch, name) is dtype), None)
