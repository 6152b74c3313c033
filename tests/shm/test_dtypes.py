"""A dtype has one name, and a name means one dtype."""

from __future__ import annotations

from typing import Literal

import ml_dtypes
import numpy as np
import pytest

from tensord.shm.payloads.dtypes import dtype_named, name_of


@pytest.mark.parametrize("code", "?bBhHiIlLqQefdgFDG")
@pytest.mark.parametrize("order", ["<", ">", "="])
def test_every_number_of_numpy_has_a_name_with_its_byte_order(code: str, order: Literal["<", ">", "="]) -> None:
    dtype = np.dtype(code).newbyteorder(order)
    if code in "gG" and dtype.str[0] == ">":
        pytest.skip("a long double of another machine")
    name = name_of(dtype)
    assert name == dtype.str
    assert dtype_named(name) == dtype


@pytest.mark.parametrize(
    "name",
    [
        "bfloat16",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ],
)
def test_narrow_floats_have_torchs_names(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    assert name_of(dtype) == name
    assert dtype_named(name) is dtype


@pytest.mark.parametrize("name", ["|S1", "|S300", "<U7", ">U7", "<M8", ">M8[ns]", "<m8[25s]"])
def test_sized_dtypes_have_their_own_str_for_a_name(name: str) -> None:
    dtype = dtype_named(name)
    assert dtype is not None
    assert name_of(dtype) == dtype.str == name


@pytest.mark.parametrize(
    "dtype", [object, "V4", "f4,f4", ("f4", (2,)), "S0", "U0", ml_dtypes.int4, np.dtypes.StringDType()]
)
def test_dtypes_that_no_leaf_can_have_have_no_name(dtype: object) -> None:
    assert name_of(np.dtype(dtype)) is None  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "name",
    [
        *("", "f4", "float32", "=f4", "|O", "|V4", "<f1", "<V2", "|S0", "<U0", "|S01", "f4,f4"),
        *("<U999999999", "<M8[0s]", "<M8[1s]", "<M8[fortnights]", "<M8[9999999999s]", "(2,)f4"),
        "x" * 60_000,
    ],
)
def test_unknown_dtype_names_have_no_dtype(name: str) -> None:
    assert dtype_named(name) is None
