"""What every Device promises: one suite, run against the fake card and against torch.

Owns: the promises. Does not own a device: a test module subclasses `Conformance` and says in a fixture `rig` how
tensors are made on its own, and what its gauge shows.
"""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.client.gpu import interface
from tensord.client.gpu.interface import Device, Mark, mapped, payload_of
from tensord.errors import DeviceFull, UsageError
from tensord.shm.payloads.dtypes import dtype_named, name_of
from tensord.shm.payloads.recipe import recipe

from ...daemon_process import PATIENCE_S

Array = np.ndarray[Any, Any]
KIB = 1 << 10
CAPACITY_BYTES = 1 << 20
GARBAGE = 0xA5


class Rig(Protocol):
    """A device under test. Its card is empty at first; the fake ones have CAPACITY_BYTES.

    `full_at_bytes`: how much the card has, where a test may fill it.
    """

    device: Any
    dtypes: tuple[str, ...]
    full_at_bytes: int | None = CAPACITY_BYTES

    def upload(self, array: Array) -> Any:
        """A tensor that holds `array` once the current stream has come to it."""

    def empty(self, size_bytes: int) -> Any:
        """A tensor of uint8 that nothing was written to."""

    def hold(self) -> AbstractContextManager[Any]:
        """Within the block the calling thread's current stream stays where it is."""

    def now(self, tensor: Any) -> Any:
        """What lies in the tensor now, on the host: nothing is waited for."""

    def slow_copies(self) -> None:
        """From now on the device's own copies take a while, so that whoever does not wait for them is too early."""

    def gauge(self) -> int:
        """What the card's gauge shows as used."""

    def another(self) -> Any:
        """A tensor of some other device."""


def bits(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and bytes of an array, for comparison to the bit."""
    name = name_of(leaf.dtype)
    assert name is not None
    return name, leaf.shape, leaf.tobytes()


def landed(device: Device, tree: Any, mark: Mark | None = None) -> Any:
    """The tree as it comes out of the ring after it has left the device: read-only views of one payload."""
    payload = payload_of(device.outgoing(tree, mark or device.mark()), device.name, depth_max=32)
    memory = np.zeros(payload.payload_bytes, np.uint8)
    payload.write(memory.data, 0)
    return recipe(payload.header).view(memory)


@st.composite
def arrays(draw: st.DrawFn, names: tuple[str, ...]) -> Array:
    dtype = dtype_named(draw(st.sampled_from(names)))
    assert dtype is not None
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    count = int(np.prod(shape, dtype=np.int64))
    seed = draw(st.integers(0, 1 << 32))
    raw = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, np.uint8)
    if dtype.kind == "b":
        raw &= 1
    return np.ndarray(shape, dtype, raw)


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    scalars = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3) | st.binary(max_size=3)
    return st.recursive(
        leaves | scalars,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        ),
        max_leaves=6,
    )


def with_arrays(tree: Any, change: Any) -> Any:
    return mapped(tree, lambda leaf, _: leaf if isinstance(leaf, bool | int | str | bytes | None) else change(leaf))


class Conformance:
    """The promises. A subclass has a fixture `rig`."""

    def test_a_tree_goes_to_the_ring_in_any_pieces_and_back_without_a_changed_bit(self, rig: Rig) -> None:
        device = rig.device

        @settings(max_examples=80, deadline=None)
        @given(trees(arrays(rig.dtypes)), st.integers(40, 300))
        def check(tree: Any, piece_bytes: int) -> None:
            patch.setattr(interface, "PIECE_BYTES", piece_bytes)
            expected = with_arrays(tree, bits)
            on_device = with_arrays(tree, rig.upload)
            host = landed(device, on_device)
            assert with_arrays(host, bits) == expected
            again = device.to_device(host)
            assert device.bytes_of(again) == device.bytes_of(on_device)
            assert with_arrays(landed(device, again), bits) == expected

        with pytest.MonkeyPatch.context() as patch:
            check()

    def test_what_leaves_is_as_it_was_when_the_mark_was_reached(self, rig: Rig) -> None:
        array = np.arange(KIB, dtype="<i4")
        found = np.zeros(4 * KIB, np.uint8)
        with ThreadPoolExecutor(1) as pool, rig.hold():
            tensor = rig.upload(array)
            mark = rig.device.mark()
            pool.submit(lambda: rig.device.outgoing(tensor, mark).read(found, 0, 4 * KIB))
        assert found.tobytes() == array.tobytes()

    def test_a_read_of_what_leaves_is_complete_when_it_returns(self, rig: Rig) -> None:
        array = np.arange(16 * KIB, dtype="<i4")
        tensor = rig.upload(array)
        leaving = rig.device.outgoing({"x": [tensor, 1]}, rig.device.mark())
        rig.slow_copies()
        found = np.zeros(4 * KIB, np.uint8)
        leaving["x"][0].read(found, 5 * KIB, 9 * KIB)
        assert found.tobytes() == array.tobytes()[5 * KIB : 9 * KIB]

    def test_a_view_of_any_strides_leaves_whole(self, rig: Rig) -> None:
        array = np.arange(4 * 6 * 8, dtype="<i4").reshape(4, 6, 8)
        tensor = rig.upload(array)
        views = {"rows": tensor[1:3], "columns": tensor[:, 1:4, 2:3], "one": tensor[2], "single": tensor[3, 5, 7]}
        expected = {"rows": array[1:3], "columns": array[:, 1:4, 2:3], "one": array[2], "single": array[3, 5, 7, ...]}
        found = landed(rig.device, views)
        assert with_arrays(found, bits) == with_arrays(expected, bits)

    def test_a_mark_tells_whether_it_was_reached(self, rig: Rig) -> None:
        with rig.hold():
            rig.upload(np.zeros(8, "<f4"))
            marks = [rig.device.mark() for _ in range(100)]
            assert not marks[0].wait(0.001)
        assert all(mark.wait(PATIENCE_S) for mark in marks) and marks[0].wait()

    def test_tensors_at_one_address_count_once(self, rig: Rig) -> None:
        base = rig.empty(8 * KIB)
        assert rig.device.bytes_of(base) == 8 * KIB
        assert rig.device.bytes_of({"a": base, "b": [base[:KIB], (3, "x")], "c": base}) == 8 * KIB
        assert rig.device.bytes_of([base[:1]]) == 1
        assert rig.device.bytes_of([base[:KIB], base[KIB:], rig.empty(4 * KIB)]) == 12 * KIB
        assert rig.device.bytes_of({"a": np.zeros(KIB), "b": [1, "x", None, b"y", 1.5]}) == 0

    def test_a_dropped_tensor_moves_no_gauge_until_the_memory_is_given_back(self, rig: Rig) -> None:
        kept = rig.upload(np.arange(KIB, dtype="<i8"))
        gc.collect()  # devices of earlier tests may have memory on the card
        rig.device.give_back()
        before_bytes = rig.gauge()
        tensor = rig.device.to_device(np.zeros(64 * KIB, np.uint8))
        with_it_bytes = rig.gauge()
        assert with_it_bytes - before_bytes >= 64 * KIB
        del tensor
        gc.collect()
        # It was lent to this stream.
        assert rig.device.mark().wait(PATIENCE_S)
        now = rig.gauge()
        assert now == with_it_bytes, f"{before_bytes} before, {with_it_bytes} with it, {now} now"
        assert rig.device.give_back() == with_it_bytes - before_bytes and rig.device.give_back() == 0
        assert rig.gauge() == before_bytes
        assert bits(landed(rig.device, kept)) == bits(np.arange(KIB, dtype="<i8"))

    def test_within_a_pause_nothing_is_done_and_what_must_not_wait_does_not(self, rig: Rig) -> None:
        device, array = rig.device, np.arange(KIB, dtype="<i4")
        tensor = rig.upload(array)
        mark = device.mark()
        paused = [device.paused]
        assert mark.wait(PATIENCE_S)
        late = [lambda: device.outgoing(tensor, mark), lambda: device.to_device(array), device.reading]
        with ThreadPoolExecutor(3) as pool, device.pause():
            paused.append(device.paused)
            done = [pool.submit(call) for call in late]
            later = device.mark()
            device.lend(tensor)
            assert device.bytes_of(tensor) and device.give_back() == 0
            assert not mark.wait(0) and not later.wait(0.001)
        assert [*paused, device.paused] == [False, True, False]
        assert all(call.result(PATIENCE_S) is not None for call in done)
        assert mark.wait(PATIENCE_S) and later.wait(PATIENCE_S)

    def test_a_pause_begins_after_the_work_that_is_under_way(self, rig: Rig) -> None:
        array = np.arange(16 * KIB, dtype="<i4")
        tensor = rig.upload(array)
        assert rig.device.mark().wait(PATIENCE_S)
        rig.slow_copies()
        with ThreadPoolExecutor(1) as pool:
            copying = pool.submit(landed, rig.device, tensor)
            with rig.device.pause():
                pass
            assert bits(copying.result(PATIENCE_S)) == bits(array)

    def test_the_gauge_is_of_the_whole_card(self, rig: Rig) -> None:
        used_bytes, total_bytes = rig.device.reading()
        assert used_bytes == rig.gauge()
        assert 0 <= used_bytes <= total_bytes

    def test_a_full_card_refuses_and_keeps_what_it_has(self, rig: Rig) -> None:
        if rig.full_at_bytes is None:
            pytest.skip("this card is not filled by tests")
        kept = rig.upload(np.full(rig.full_at_bytes // 2, 7, np.uint8))
        before_bytes = rig.gauge()
        with pytest.raises(DeviceFull, match=rig.device.name):
            rig.device.to_device([np.zeros(KIB), np.zeros(rig.full_at_bytes, np.uint8)])
        gc.collect()
        assert rig.gauge() == before_bytes
        assert bits(landed(rig.device, kept))[2] == b"\7" * (rig.full_at_bytes // 2)

    def test_a_promoted_tree_is_complete_before_the_caller_gets_it(self, rig: Rig) -> None:
        array = np.arange(16 * KIB, dtype="<i4")
        rig.slow_copies()
        # While the caller's own stream is held up: it waits for nothing of the caller's.
        with rig.hold():
            made = rig.device.to_device({"x": array})
            assert bits(rig.now(made["x"])) == bits(array)

    def test_tensors_of_another_device_are_refused_by_place(self, rig: Rig) -> None:
        with pytest.raises(UsageError, match=r"tree\['a'\]\[1\] lies on"):
            rig.device.bytes_of({"a": [1, rig.another()]})

    def test_several_threads_copy_at_once(self, rig: Rig) -> None:
        expected = [np.full(5 * KIB + number, number, "<i4") for number in range(6)]
        tensors = [rig.upload(array) for array in expected]
        mark = rig.device.mark()

        def copied(tensor: Any) -> Any:
            for _ in range(5):
                found = landed(rig.device, tensor, mark)
                rig.device.to_device(found)
            return bits(found)

        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(copied, tensors, timeout=PATIENCE_S)) == [bits(array) for array in expected]
