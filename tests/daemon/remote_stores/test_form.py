"""The form of an object: what its reader may rely on."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.forms.events import RemoteEntry
from tensord.daemon.remote_stores.form import check, object_header
from tensord.errors import Corrupt, UsageError
from tensord.shm.ring.layout import TREE_BYTES_MAX

from .entries import key_of, made

NOW_S = 1e9


def stored(**meta: Any) -> bytes:
    entry = made(1, 1000, **meta)
    return object_header(entry.key, entry.entry, NOW_S) + entry.payload


def test_the_format_of_version_1_never_changes() -> None:
    """Another host may run another release: what a header means is fixed for its version."""
    key, parent = bytes(range(32)), bytes(range(32, 64))
    entry = RemoteEntry(5000, 40, 1024, 12.5, 96, 1e9, parent, 0x1122334455667788)
    header = object_header(key, entry, NOW_S)
    numbers = (5000, 40, 0x1122334455667788, 1024, 96, 12.5, 0.0, 2e9, 1)
    fields = struct.pack("<8sI32sQIQQIdddB32s", b"TNSROBJ\0", 1, key, *numbers, parent).ljust(188, b"\0")
    assert header == fields + zlib.crc32(fields).to_bytes(4, "little")


@pytest.mark.parametrize(
    "meta",
    [
        {"cost_ms": float("nan")},
        {"cost_ms": -1.0},
        {"lives_s": float("inf")},
        {"lives_s": float("nan")},
        {"lives_s": -2 * NOW_S},
        {"prefix_bytes": 1001},
    ],
)
def test_impossible_metadata_is_corrupt_although_its_check_is_right(meta: dict[str, float]) -> None:
    with pytest.raises(Corrupt, match="impossible metadata"):
        check(key_of(1), memoryview(stored(**meta)), NOW_S)


@pytest.mark.parametrize(
    ("at", "field", "header", "says"),
    [
        (8, b"\2", False, "format version 2, this tensord reads 1"),
        *((44, length, False, f"its header names 192 \\+ {length}") for length in (999, 1001)),
        *(
            (44, length, True, f"names a payload of {length} bytes, of which 40 are")
            for length in (0, 39, (1 << 48) + 1, 1 << 63)
        ),
    ],
)
def test_an_object_of_another_version_or_length_is_corrupt_although_its_check_is_right(
    at: int, field: bytes | int, header: bool, says: str
) -> None:
    changed = bytearray(stored())
    value = field if isinstance(field, bytes) else field.to_bytes(8, "little")
    changed[at : at + len(value)] = value
    changed[188:192] = zlib.crc32(changed[:188]).to_bytes(4, "little")
    with pytest.raises(Corrupt, match=says):
        check(key_of(1), memoryview(changed), NOW_S, header=header)


@given(st.binary(max_size=400))
def test_no_bytes_end_a_check_in_another_way_than_corrupt(raw: bytes) -> None:
    with pytest.raises(Corrupt):
        check(key_of(1), memoryview(raw), NOW_S)


@given(st.integers(0, 1191), st.integers(1, 255))
def test_no_changed_byte_of_an_object_goes_unnoticed(at: int, change: int) -> None:
    raw = bytearray(stored())
    raw[at] ^= change
    with pytest.raises(Corrupt):
        check(key_of(1), memoryview(raw), NOW_S)


@pytest.mark.parametrize(("payload_bytes", "tree_bytes"), [(0, 0), (10, 0), (10, 11), (1 << 20, TREE_BYTES_MAX + 1)])
def test_a_payload_without_a_whole_tree_is_not_stored(payload_bytes: int, tree_bytes: int) -> None:
    with pytest.raises(UsageError, match=f"{payload_bytes} bytes with a tree header of {tree_bytes}"):
        object_header(key_of(1), RemoteEntry(payload_bytes, tree_bytes), NOW_S)
