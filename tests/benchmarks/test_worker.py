"""What a benchmark's figures rest on: what is timed and put, and that what is read is right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import worker
from peers import Array, BaseReader, BaseWriter, consume
from worker import ReaderRole, WriterRole, key_count, key_of

BYTES = 16 << 20


class _Writer(BaseWriter):
    def __init__(self) -> None:
        super().__init__(Path())
        self.calls: list[str] = []
        self.keys: list[bytes] = []
        self.store: dict[bytes, Array] = {}

    def put(self, key: bytes, value: Array) -> int:
        self.calls.append("put")
        self.keys.append(key)
        self.store[key] = value
        return len(self.keys)

    def put_visible(self, key: bytes, value: Array) -> int:
        self.put(key, value)
        self.calls[-1] = "put_visible"
        return len(self.keys)

    def put_many(self, pairs: Sequence[tuple[bytes, Array]]) -> None:
        self.store.update(pairs)
        self.calls.append("put_many")

    def flush(self) -> None:
        self.calls.append("flush")


class _Reader(BaseReader):
    def __init__(self, store: dict[bytes, Array]) -> None:
        super().__init__(Path())
        self.store = store
        self.told: list[Any] = []

    def learn(self, keys: Sequence[bytes], tokens: Sequence[Any]) -> None:
        self.told = [*zip(keys, tokens, strict=True)]

    def get(self, key: bytes) -> None:
        self.store[key]

    def get_consume(self, key: bytes) -> int:
        return consume(self.store[key])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock finds it 1,000 ns on."""
    ticks = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(worker, "_clock", lambda: next(ticks))


@pytest.mark.usefixtures("clock")
def test_each_call_is_timed_by_itself_over_all_arguments_in_turn() -> None:
    seen: list[int] = []
    assert worker.timed(seen.append, [1, 2, 3], calls=7, seconds=1) == [1000] * 7
    assert seen == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.usefixtures("clock")
def test_timing_ends_when_its_time_is_over_but_not_before_three_calls() -> None:
    assert len(worker.timed(lambda _: None, [1], calls=100, seconds=0)) == 3
    assert len(worker.timed(lambda _: None, [1], calls=100, seconds=19e-6)) == 10


def test_a_store_that_makes_room_by_itself_never_gets_a_key_twice() -> None:
    writer = _Writer()
    role = WriterRole(writer, evicts_by_itself=True)
    for op in ("put_return", "put_visible", "put_sustained"):
        role.measure(op, BYTES, calls=40, seconds=60)
    assert len(writer.keys) > 2 * key_count(BYTES)
    assert len(set(writer.keys)) == len(writer.keys)


def test_any_other_store_gets_its_keys_again_in_turn_and_all_of_them() -> None:
    writer = _Writer()
    WriterRole(writer, evicts_by_itself=False).measure("put_visible", BYTES, calls=40, seconds=60)
    rotation = key_count(BYTES)
    assert len(set(writer.keys)) == rotation
    assert writer.keys[:rotation] == writer.keys[rotation : 2 * rotation]


def test_values_rotate_over_all_of_the_memory() -> None:
    writer = _Writer()
    role = WriterRole(writer, evicts_by_itself=False)
    role.measure("put_return", BYTES, calls=key_count(BYTES), seconds=60)
    starts = {value.__array_interface__["data"][0] for value in writer.store.values()}
    assert max(starts) - min(starts) == worker.ROTATE_BYTES - BYTES


def test_a_put_until_the_caller_may_go_on_begins_with_an_idle_store() -> None:
    writer = _Writer()
    WriterRole(writer, evicts_by_itself=True).measure("put_return", BYTES, calls=3, seconds=60)
    assert writer.calls == ["put", "flush"] * 3


def test_sustained_puts_are_back_to_back_and_end_when_all_are_visible() -> None:
    writer = _Writer()
    role = WriterRole(writer, evicts_by_itself=True)
    (sample,) = role.measure("put_sustained", BYTES, calls=1, seconds=60)
    assert sample > 0
    assert writer.calls[-1] == "flush"
    assert writer.calls[:-1] == ["put"] * (worker.SUSTAINED_BYTES_MAX // BYTES)


def test_a_batch_is_put_in_one_call_and_each_put_has_its_share_of_the_time() -> None:
    writer = _Writer()
    role = WriterRole(writer, evicts_by_itself=True)
    (sample,) = role.measure("put_many", BYTES, calls=1, seconds=60)
    assert sample > 0
    assert writer.calls == ["put_many"]


def test_the_reader_gets_every_token_and_reads_the_stored_payloads() -> None:
    writer = _Writer()
    tokens = WriterRole(writer, evicts_by_itself=True).put_keys(BYTES)
    reader = _Reader(writer.store)
    ReaderRole(reader).learn(BYTES, tokens)
    keys = [key_of("get", BYTES, number) for number in range(key_count(BYTES))]
    assert reader.told == [*zip(keys, range(1, len(keys) + 1), strict=True)]


def test_a_peer_that_gives_back_something_else_is_not_measured() -> None:
    writer = _Writer()
    tokens = WriterRole(writer, evicts_by_itself=True).put_keys(BYTES)
    last = key_of("get", BYTES, key_count(BYTES) - 1)
    writer.store[last] = writer.store[last].copy()
    writer.store[last][-1] ^= np.uint64(1)
    with pytest.raises(AssertionError, match=f"of {BYTES} bytes sums to"):
        ReaderRole(_Reader(writer.store)).learn(BYTES, tokens)
