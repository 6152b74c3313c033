"""A payload arrives whole, in however many pieces, and nothing else is written."""

from __future__ import annotations

import sys
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.errors import UsageError
from tensord.shm.payload import Payload
from tensord.shm.tree import Spec, encode, encode_spec

Array = np.ndarray[Any, Any]


def numbers(*shape: int, dtype: str = "<i4") -> Array:
    return np.arange(1, 1 + int(np.prod(shape))).astype(dtype).reshape(shape)


PAYLOADS = [
    encode(tree)
    for tree in (
        numbers(5, 7),
        [numbers(5, 7).T, numbers(4, 3, 5).transpose(1, 2, 0)[::-1], numbers(9, dtype="f8")[::2]],
        {"a": numbers(3, dtype="i1"), "b": np.zeros((0, 3)), "c": np.array(7.5), "d": "é" * 200},
        [np.broadcast_to(numbers(3), (4, 2, 3)), numbers(6, 8, dtype="<c16")[1::2, ::3], b"q" * 300],
        [numbers(2, 2), np.zeros(0)],
        {"a": [1, 2, None]},
    )
]


def whole(payload: Payload) -> bytes:
    root = np.full(payload.payload_bytes, 0xA5, np.uint8)
    payload.write_into(root)
    return root.tobytes()


def test_a_payload_is_header_zeros_and_leaves_in_c_order() -> None:
    payload = encode([numbers(2, 3).T, np.ones(2, np.int8)])
    expected = payload.header.ljust(64, b"\0") + numbers(2, 3).T.tobytes().ljust(64, b"\0") + b"\1\1"
    assert whole(payload) == expected
    assert [(leaf.offset, leaf.end) for leaf in payload.leaves] == [(64, 88), (128, 130)]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(PAYLOADS), st.data())
def test_ranges_cut_anywhere_write_the_same_payload(payload: Payload, data: st.DataObject) -> None:
    places = st.integers(0, payload.payload_bytes)
    cuts = [0, *sorted(data.draw(st.lists(places, max_size=6))), payload.payload_bytes]
    pieces = []
    for start, stop in pairwise(cuts):
        piece = np.full(stop - start + 8, 0xA5, np.uint8)
        payload.write_range(piece, start, stop)
        assert (piece[stop - start :] == 0xA5).all()
        pieces.append(piece[: stop - start].tobytes())
    assert b"".join(pieces) == whole(payload)


@pytest.mark.parametrize("position", range(len(PAYLOADS)))
def test_every_range_of_a_few_bytes_equals_that_part_of_the_whole(position: int) -> None:
    payload = PAYLOADS[position]
    expected = whole(payload)
    for size in (1, 3):
        for start in range(payload.payload_bytes - size + 1):
            piece = np.zeros(size, np.uint8)
            payload.write_range(piece, start, start + size)
            assert piece.tobytes() == expected[start : start + size]


def test_bytes_behind_the_payload_are_unchanged() -> None:
    payload = PAYLOADS[0]
    memory = bytearray(b"\xa5" * (payload.payload_bytes + 100))
    payload.write_into(memoryview(memory))
    assert memory[: payload.payload_bytes] == whole(payload)
    assert memory[payload.payload_bytes :] == b"\xa5" * 100


def test_writing_ranges_leaves_a_reserved_leaf_as_its_owner_wrote_it() -> None:
    payload = encode_spec([Spec((10,), "f4"), numbers(3), Spec((5,), "u1")])
    memory = np.full(payload.payload_bytes, 0xA5, np.uint8)
    for start in range(0, payload.payload_bytes, 7):
        stop = min(start + 7, payload.payload_bytes)
        payload.write_range(memory[start:stop], start, stop)
    expected = payload.header.ljust(64, b"\0") + (b"\xa5" * 40).ljust(64, b"\0")
    assert memory.tobytes() == expected + numbers(3).tobytes().ljust(64, b"\0") + b"\xa5" * 5


@pytest.mark.parametrize("span", [(-1, 5), (5, 4), (0, 10_000)])
def test_a_range_outside_the_payload_is_refused(span: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=rf"\[{span[0]}, {span[1]}\) is not within the payload's 204"):
        PAYLOADS[0].write_range(np.zeros(20_000, np.uint8), *span)


def test_a_buffer_that_cannot_take_the_payload_is_refused() -> None:
    with pytest.raises(UsageError, match=r"203 bytes \(writable: True\) was given for 204 bytes"):
        PAYLOADS[0].write_into(bytearray(203))
    with pytest.raises(UsageError, match="writable: False"):
        PAYLOADS[0].write_into(memoryview(bytes(204)))


@pytest.mark.parametrize("strided", [False, True])
def test_other_threads_run_while_a_large_leaf_is_copied(strided: bool) -> None:
    array = np.zeros((2048, 8192), np.uint8)
    payload = encode(array[:, ::2] if strided else array)
    memory = np.zeros(payload.payload_bytes, np.uint8)
    gate = threading.Lock()
    gate.acquire()
    ran: list[bool] = []

    def run() -> None:
        with gate:
            ran.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # nobody gets the GIL from a thread that does not give it
    try:
        gate.release()
        for _ in range(200):
            payload.write_into(memory)
            if ran:
                break
        seen = bool(ran)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert seen
