"""What a remote store with a server of its own promises, besides the suite of all stores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import pytest

from tensord.daemon.remote_stores.store import RemoteStore
from tensord.errors import TierFull, TierTimedOut, TierUnavailable

from .conformance import MIB, Backend
from .entries import get, heads, key_of, made, put


class Server(Backend):
    """A store with a process of its own."""

    @abstractmethod
    def fill(self) -> None:
        """From now on there is no room for 1 MiB."""

    @abstractmethod
    def pause(self) -> None: ...

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def kill(self) -> None: ...

    @abstractmethod
    def restart(self) -> None:
        """Starts it again, at the same address and without objects."""


class AnyServer:
    """What a store with a server of its own promises besides. `backend` yields a Server."""

    @pytest.fixture
    def store(self, backend: Server) -> Iterator[RemoteStore]:
        store = backend.open()
        yield store
        store.close()

    def test_a_full_store_says_so_and_keeps_serving(self, backend: Server, store: RemoteStore) -> None:
        small = made(1)
        put(store, small)
        backend.fill()
        with pytest.raises(TierFull, match=r"bytes"):
            put(store, made(2, MIB))
        assert get(store, small.key) in (None, (small.payload, small.entry))
        assert get(store, key_of(2)) is None
        assert store.corrupt == 0

    @pytest.mark.parametrize("connected", [True, False])
    def test_a_stopped_server_costs_a_call_its_time_and_no_byte(self, backend: Server, connected: bool) -> None:
        store = backend.open(timeout_s=0.2)
        entry = made(1, 8 * MIB)
        if connected:
            put(store, entry)
        backend.pause()
        try:
            buffer = memoryview(bytearray(entry.stored_bytes))
            for call in (
                lambda: store.get_into(entry.key, buffer),
                lambda: put(store, entry),
                lambda: store.look([entry.key]),
                lambda: store.remove([entry.key]),
                lambda: store.claim(entry.key, b"me", 1.0),
            ):
                with pytest.raises(TierTimedOut, match=r"within 0\.2 s"):
                    call()
        finally:
            backend.resume()
        store = backend.open()
        put(store, entry)
        assert get(store, entry.key, 8 * MIB) == (entry.payload, entry.entry)
        assert store.corrupt == 0
        store.close()

    def test_a_killed_server_is_an_error_and_a_restarted_one_serves(self, backend: Server, store: RemoteStore) -> None:
        entry = made(1)
        put(store, entry)
        backend.kill()
        for _ in range(2):
            with pytest.raises(TierUnavailable) as raised:
                get(store, entry.key)
            assert "://127.0.0.1:" in str(raised.value)
            with pytest.raises(TierUnavailable):
                put(store, entry)
            with pytest.raises(TierUnavailable):
                heads(store, [entry.key])
        backend.restart()
        assert get(store, entry.key) is None
        put(store, entry)
        assert get(store, entry.key) == (entry.payload, entry.entry)
