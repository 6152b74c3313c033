"""The conformance suite of all remote stores: what each promises to its caller.

The test file of a store derives `AnyStore`, and says by a fixture `backend` how the store is reached and how its bytes
are changed behind its back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tensord.daemon.forms.events import RemoteEntry
from tensord.daemon.remote_stores.form import OBJECT_HEADER_BYTES
from tensord.daemon.remote_stores.store import RemoteStore, open_store
from tensord.errors import TierUnavailable
from tests.daemon_process import PATIENCE_S
from tests.processes import Child, Stage

from .entries import get, heads, key_of, made, made_of, payload_of, put

MIB = 1 << 20


class Backend(ABC):
    """Where a store keeps its objects."""

    url: str

    def open(self, timeout_s: float = PATIENCE_S) -> RemoteStore:
        return open_store(self.url, timeout_s)

    @abstractmethod
    def raw(self, key: bytes) -> bytes:
        """The stored bytes of a key."""

    @abstractmethod
    def set_raw(self, key: bytes, stored: bytes) -> None:
        """Replaces them."""


class AnyStore:
    """The suite. A class derived from it has a fixture `backend`, which yields a Backend."""

    replaces_at_once = True
    """False: while an object is replaced, and after its writer was killed, it is a miss."""

    # ---- what is put is found

    @pytest.mark.parametrize("payload_bytes", [1, 63, 4096, 65_537, MIB, 34 * MIB])
    def test_a_payload_comes_back_as_it_was_put(self, store: RemoteStore, payload_bytes: int) -> None:
        entry = made(1, payload_bytes, tokens=77, cost_ms=12.5, parent=key_of(2))
        put(store, entry)
        assert get(store, entry.key, payload_bytes) == (entry.payload, entry.entry)

    def test_a_header_says_what_is_stored_and_how_large_its_buffer_must_be(self, store: RemoteStore) -> None:
        small, large = made(1, 10), made(2, 70_000, tokens=5, cost_ms=1.5, parent=key_of(4))
        put(store, small, large)
        keys = [large.key, key_of(3), small.key]
        expected = [large.entry, None, small.entry]
        assert store.look(keys) == (0, expected)
        exact = memoryview(bytearray(large.stored_bytes))
        assert payload_of(store.get_into(large.key, exact), exact) == (large.payload, large.entry)

    def test_a_damaged_header_and_one_whose_time_is_over_are_no_headers(
        self, backend: Backend, store: RemoteStore
    ) -> None:
        damaged, over = made(1), made(2, lives_s=-1.0)
        put(store, damaged, over)
        raw = backend.raw(damaged.key)
        backend.set_raw(damaged.key, raw[:20] + bytes([raw[20] ^ 1]) + raw[21:])
        assert heads(store, [damaged.key, over.key]) == [None, None]
        assert store.corrupt == 1

    def test_a_put_of_the_same_key_replaces_the_payload(self, store: RemoteStore) -> None:
        for payload_bytes in (5000, 90_000, 3):
            entry = made_of(key_of(1), np.random.default_rng(payload_bytes).bytes(payload_bytes))
            put(store, entry)
            assert get(store, entry.key) == (entry.payload, entry.entry)
        assert heads(store, [key_of(1)]) == [entry.entry]

    def test_a_removed_key_is_a_miss(self, store: RemoteStore) -> None:
        entries = [made(number) for number in range(3)]
        put(store, *entries)
        store.remove([entries[0].key, key_of(9), entries[2].key])
        assert [get(store, entry.key) is not None for entry in entries] == [False, True, False]
        assert get(store, key_of(9)) is None and store.corrupt == 0, "it was never put"

    def test_an_object_larger_than_the_buffer_is_a_miss_and_the_next_read_is_right(self, store: RemoteStore) -> None:
        large, small = made(1, 3 * MIB), made(2)
        put(store, large, small)
        assert get(store, large.key, 3 * MIB - 1) is None
        assert get(store, small.key) == (small.payload, small.entry)
        assert store.corrupt == 0

    def test_an_entry_whose_time_is_over_is_a_miss(self, store: RemoteStore) -> None:
        over, not_over = made(1, lives_s=-1.0), made(2, lives_s=3600.0)
        put(store, over, not_over)
        assert get(store, over.key) is None
        found = get(store, not_over.key)
        assert found is not None and found[0] == not_over.payload and 3500 < (found[1].lives_s or 0) <= 3600
        assert store.corrupt == 0

    # ---- nothing wrong is returned

    @pytest.mark.parametrize(
        "damage",
        [
            pytest.param(lambda raw: raw[:-1], id="cut by one byte"),
            pytest.param(lambda raw: raw[: len(raw) // 2], id="cut in half"),
            pytest.param(lambda raw: raw[:OBJECT_HEADER_BYTES], id="only a header"),
            pytest.param(lambda raw: raw[:100], id="half a header"),
            pytest.param(lambda raw: raw + b"\0", id="one byte more"),
            pytest.param(lambda raw: raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:], id="a bit of the payload"),
            pytest.param(lambda raw: bytes(len(raw)), id="zeros"),
            pytest.param(lambda raw: raw[:8] + (2).to_bytes(4, "little") + raw[12:], id="another format version"),
        ],
    )
    def test_changed_bytes_are_a_counted_miss(
        self, backend: Backend, store: RemoteStore, damage: Callable[[bytes], bytes]
    ) -> None:
        entry, other = made(1), made(2)
        put(store, entry, other)
        backend.set_raw(entry.key, damage(backend.raw(entry.key)))
        assert get(store, entry.key) is None
        assert store.corrupt == 1
        assert store.address in store.last_corrupt
        assert get(store, other.key) == (other.payload, other.entry)
        put(store, entry)
        assert get(store, entry.key) == (entry.payload, entry.entry)
        assert store.corrupt == 1

    def test_the_object_of_another_key_is_a_counted_miss(self, backend: Backend, store: RemoteStore) -> None:
        entry = made(1)
        past = bytearray(entry.key)
        past[-4:] = (2).to_bytes(4, "little")
        put(store, made_of(bytes(past), b"old weights"), entry)
        backend.set_raw(entry.key, backend.raw(bytes(past)))
        assert get(store, entry.key) is None
        assert store.corrupt == 1

    def test_a_killed_writer_leaves_the_old_object_or_the_new_one(self, backend: Backend, store: RemoteStore) -> None:
        key = key_of(1)
        whole = {bytes([number]) * (8 * MIB + number) for number in range(1, 5)}
        for _ in range(4):
            with Child(write_on, backend.url, key) as writer:
                for _ in range(3):
                    writer.hear()
                writer.kill()
            self.one_of(whole, get(store, key, 9 * MIB))
        assert store.corrupt == 0

    def one_of(self, payloads: Collection[bytes], found: tuple[bytes, RemoteEntry] | None) -> None:
        """Asserts that one of the payloads was found."""
        assert found[0] in payloads if found is not None else not self.replaces_at_once

    def test_many_threads_may_share_a_store(self, store: RemoteStore) -> None:
        entries = [made(number, 50_000 + number) for number in range(40)]

        def works(first: int) -> bool:
            for entry in entries[first::8]:
                put(store, entry)
                assert get(store, entry.key) == (entry.payload, entry.entry)
            return True

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(works, range(8)))

    # ---- faults

    def test_a_store_is_closed_once_or_twice_and_says_so_afterwards(self, backend: Backend) -> None:
        store = backend.open()
        put(store, made(1))
        store.close()
        store.close()
        with pytest.raises(TierUnavailable, match="closed"):
            get(store, key_of(1))
        with pytest.raises(TierUnavailable, match="closed"):
            put(store, made(1))
        backend.open().close()  # without a call in between

    # ---- generations

    def test_generations_are_given_out_once_each_and_only_rise(self, backend: Backend, store: RemoteStore) -> None:
        tags = [b"a model.", b"another."]
        assert store.generations(tags) == [0, 0]
        assert store.raise_generation(tags[0], 1) == 1
        assert store.raise_generation(tags[0], 1) == 2
        assert store.raise_generation(tags[0], 9) == 9
        other = backend.open()
        assert other.generations(tags) == [9, 0]
        assert other.raise_generation(tags[0], 3) == 10
        other.close()
        assert store.generations([]) == []

    def test_hosts_that_raise_a_generation_at_once_get_different_numbers(self, backend: Backend) -> None:
        def works(_: int) -> list[int]:
            own = backend.open()
            numbers = [own.raise_generation(b"a model.", 1) for _ in range(25)]
            own.close()
            return numbers

        with ThreadPoolExecutor(4) as threads:
            assert len(set().union(*threads.map(works, range(4)))) == 100

    # ---- claims

    def test_one_owner_has_a_claim_or_the_store_has_no_claims(self, backend: Backend, store: RemoteStore) -> None:
        other = backend.open()
        first = store.claim(key_of(1), b"host 1", 60.0)
        if first is None:
            assert store.unclaim(key_of(1), b"host 1") is None
            other.close()
            return
        assert first == (True, 0.0)
        assert store.claim(key_of(1), b"host 1", 60.0) == (True, 0.0), "it is the owner's own"
        assert not claims(other, key_of(1), b"host 2", 60.0)
        assert claims(other, key_of(2), b"host 2", 60.0)
        assert other.unclaim(key_of(1), b"host 2") is False
        assert not claims(other, key_of(1), b"host 2", 60.0)
        assert store.unclaim(key_of(1), b"host 1") is True
        assert store.unclaim(key_of(1), b"host 1") is False
        assert claims(other, key_of(1), b"host 2", 60.0)
        other.close()


def claims(store: RemoteStore, key: bytes, owner: bytes, seconds: float) -> bool:
    """Whether the owner gets a claim."""
    claim = store.claim(key, owner, seconds)
    assert claim is not None
    return claim.mine


def write_on(stage: Stage, url: str, key: bytes) -> None:
    """Puts payloads of 8 MiB under one key, until it is killed."""
    store = open_store(url)
    entries = [made_of(key, bytes([number]) * (8 * MIB + number)) for number in range(1, 5)]
    while True:
        for entry in entries:
            put(store, entry)
            stage.tell("put")
