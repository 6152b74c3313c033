"""A payload arrives whole, and nothing beside it is written."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest

from tensord.shm.packing import pack, pack_spec
from tensord.shm.places import Spec

Array = np.ndarray[Any, Any]


def numbers(*shape: int, dtype: str = "<i4") -> Array:
    return np.arange(1, 1 + int(np.prod(shape))).astype(dtype).reshape(shape)


def test_a_payload_is_header_zeros_and_leaves_in_c_order() -> None:
    payload = pack([numbers(2, 3).T, np.ones(2, np.int8)])
    memory = np.full(payload.payload_bytes, 0xA5, np.uint8)
    payload.write(memory.data, 0)
    expected = payload.header.ljust(64, b"\0") + numbers(2, 3).T.tobytes().ljust(64, b"\0") + b"\1\1"
    assert memory.tobytes() == expected


def test_a_reserved_leaf_stays_as_its_owner_wrote_it() -> None:
    payload = pack_spec([Spec((10,), "f4"), numbers(3), Spec((5,), "u1")])
    memory = np.full(payload.payload_bytes, 0xA5, np.uint8)
    payload.write(memory.data, 0)
    expected = payload.header.ljust(64, b"\0") + (b"\xa5" * 40).ljust(64, b"\0")
    assert memory.tobytes() == expected + numbers(3).tobytes().ljust(64, b"\0") + b"\xa5" * 5


@pytest.mark.parametrize("strided", [False, True])
def test_other_threads_run_while_a_large_leaf_is_copied(strided: bool) -> None:
    array = np.zeros((2048, 8192), np.uint8)
    payload = pack(array[:, ::2] if strided else array)
    memory = memoryview(bytearray(payload.payload_bytes))
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
            payload.write(memory, 0)
            if ran:
                break
        seen = bool(ran)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert seen
