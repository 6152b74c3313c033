"""Keys: equal for what is equal, different for whatever tells two payloads apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.client.arguments.namespace import Namespace
from tensord.errors import BadNamespace

BASE: dict[str, Any] = {"model": "m", "revision": "r", "dtype": "bfloat16", "processor": "p 1.0"}
FORMER = "f683fbb4c342ab636b8a7c792745662721f7749d262f1aeb0b0166ef00000000"
NAMESPACE = Namespace(**BASE)


@given(st.binary(), st.binary())
def test_keys_are_32_bytes_and_equal_for_equal_content_only(one: bytes, other: bytes) -> None:
    a, b = NAMESPACE.key("encoder", "image", one), NAMESPACE.key("encoder", "image", other)
    assert len(a) == 32
    assert (a == b) == (one == other)
    assert a[:8] == b[:8] == NAMESPACE.tag
    assert NAMESPACE.key("encoder", "image", bytearray(one)) == a
    assert NAMESPACE.key("encoder", "image", memoryview(one)) == a


@pytest.mark.parametrize("field", [name for name in Namespace.__struct_fields__ if name not in ("generation", "hash")])
def test_a_change_of_any_field_changes_the_namespace_s_keys_and_tag(field: str) -> None:
    other = Namespace(**{**BASE, field: "another"})
    assert other.tag != NAMESPACE.tag
    assert other.key("encoder", "image", b"x")[8:] != NAMESPACE.key("encoder", "image", b"x")[8:]


def test_another_generation_has_other_keys_under_the_same_tag() -> None:
    raised = NAMESPACE.raised_to(1)
    assert raised.generation == 1
    assert raised.tag == NAMESPACE.tag
    a, b = raised.key("encoder", "image", b"x"), NAMESPACE.key("encoder", "image", b"x")
    assert a[:8] == b[:8]
    # The digests differ too: by them the index tells keys apart.
    assert a[8:28] != b[8:28]
    assert (a[28:], b[28:]) == (b"\1\0\0\0", b"\0\0\0\0")


def test_kind_modality_and_names_of_parameters_tell_keys_apart_and_their_order_does_not() -> None:
    keys = [
        *(NAMESPACE.key(*of, b"x") for of in (("encoder", "image"), ("processor", "image"), ("encoder", "audio"))),
        *(NAMESPACE.key("encoder", "image", b"x", **{name: 448}) for name in ("resolution", "crop")),
    ]
    assert len(set(keys)) == len(keys)
    assert NAMESPACE.key("e", "i", b"", a=1, b=2) == NAMESPACE.key("e", "i", b"", b=2, a=1)


def test_arrays_count_by_value_dtype_and_shape_and_not_by_layout() -> None:
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)

    def key(content: Any) -> bytes:
        return NAMESPACE.key("encoder", "image", content)

    assert key(array) == key(array.copy()) == key(np.asfortranarray(array)) == key(np.repeat(array, 2, 1)[:, ::2])
    others = [array.T, array.reshape(4, 3), array.astype(np.int8), array + np.uint8(1), array.tobytes()]
    assert len({key(array), *map(key, others)}) == 6
    assert key(np.float32(1).reshape(())) != key(np.float32(1).reshape(1))
    key(np.empty((0, 3), np.float32))


def test_a_key_is_the_same_in_every_process_and_version() -> None:
    # Written down once: entries outlive processes, so keys must not change by accident.
    key = NAMESPACE.key("encoder", "image", b"picture", resolution=448)
    assert key.hex() == "f683fbb4c342ab63b06b10126a3d685219a4738e04c1147968b6335600000000"
    size = {"height": 1, "w": [2.5, True, ("a", b"b")]}
    sorted_key = NAMESPACE.key("e", "i", b"", crop=None, size=size, steps={2: "x", 10: "y"})
    assert sorted_key.hex() == FORMER


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": ""}, "model is empty"),
        ({"revision": ""}, "revision is empty"),
        ({"dtype": ""}, "dtype is empty"),
        ({"processor": ""}, "processor is empty"),
        ({"model": 7}, "model=7 must be a string, not int"),
        ({"lora": None}, "lora=None must be a string"),
        ({"generation": -1}, "generation=-1"),
        ({"generation": 1 << 32}, "generation=4294967296 .* to 4294967295"),
        ({"generation": "1"}, "generation='1'"),
        ({"hash": "md5"}, "hash='md5' must be"),
    ],
)
def test_a_namespace_that_could_mix_up_two_encoders_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(BadNamespace, match=message):
        Namespace(**{**BASE, **changed})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"w": 1, "h": 2}, {"h": 2, "w": 1}),
        ([{"crop": ({"w": 1, "h": 2},)}], [{"crop": ({"h": 2, "w": 1},)}]),
        ({1: "a", "b": {3: 4, b"5": 6}}, {"b": {b"5": 6, 3: 4}, 1: "a"}),
        (448, np.int64(448)),
        (448, np.uint8(192) + np.int16(256)),
        (True, np.bool_(True)),
        (0.5, np.float16(0.5)),
        (float(np.float32(0.1)), np.float32(0.1)),
        (0.1, np.float64(0.1)),
        ([1, {"w": 2.5}], (np.int32(1), {np.str_("w"): np.float32(2.5)})),
        ({1: 2}, {np.int64(1): np.int64(2)}),
    ],
)
def test_equal_parameters_make_one_key_however_they_are_written(one: object, other: object) -> None:
    assert NAMESPACE.key("e", "i", b"", size=one) == NAMESPACE.key("e", "i", b"", size=other)


@pytest.mark.parametrize(
    "several",
    [
        (1, True, 1.0, "1", b"1", None),
        (np.int64(1), np.bool_(True), np.float32(1), [1], {1: 1}),
        (0.1, np.float32(0.1), np.float16(0.1)),
        ([1, 2], [2, 1], {1: 2}, {2: 1}, {"1": 2}),
    ],
)
def test_other_parameters_make_other_keys(several: tuple[object, ...]) -> None:
    assert len({NAMESPACE.key("e", "i", b"", size=each) for each in several}) == len(several)


def _cycle() -> list[object]:
    cycle: list[object] = []
    cycle.append(cycle)
    return cycle


@pytest.mark.parametrize(
    "bad", [object(), {1, 2}, 1 << 70, [object()], np.timedelta64(1, "s"), np.array(1), np.complex64(1), _cycle()]
)
def test_parameters_that_cannot_be_part_of_a_key_are_refused(bad: object) -> None:
    with pytest.raises(BadNamespace, match="parameters"):
        NAMESPACE.key("encoder", "image", b"x", odd=bad)


@pytest.mark.parametrize("content", ["text", 5, None, np.array([object()])], ids=["text", "number", "none", "objects"])
def test_content_that_has_no_bytes_is_refused(content: Any) -> None:
    with pytest.raises(BadNamespace, match="cannot be hashed"):
        NAMESPACE.key("encoder", "image", content)


def test_blake3_gives_other_keys_and_says_what_to_install() -> None:
    other = Namespace(**BASE, hash="blake3")
    try:
        import blake3  # noqa: F401
    except ImportError:
        with pytest.raises(BadNamespace, match="pip install"):
            other.key("encoder", "image", b"x")
        return
    assert other.key("encoder", "image", b"x") != NAMESPACE.key("encoder", "image", b"x")
