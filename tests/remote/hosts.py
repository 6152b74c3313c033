"""Hosts for the tests of the remote store: each is a daemon with a ring of its own, and one client.

Owns: what an entry of a key holds, and what a host says of the remote store. Does not own the store's processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import Any, Self

import numpy as np

import tensord
from tensord.shm.index.keys import make_key

from ..daemon_process import PATIENCE_S, Daemon, until

MIB = 1 << 20
LONG_S = 20.0
"""How long computing takes, and how long the store may take to answer, where a test needs the answer: no test should
depend on how busy the machine is."""
SHORT_S = 0.5
"""How long computing takes where a test's store does not answer, or another host's claim is waited for in vain."""
_hosts = count(1)
NAMESPACE = tensord.Namespace(model="model", revision="1", dtype="float16", processor="processor")


def key(number: int, generation: int = 0) -> bytes:
    return make_key(NAMESPACE.tag, number.to_bytes(8, "little") * 3, generation)


def tree(number: int, payload_bytes: int = 100_000) -> dict[str, Any]:
    """The one right payload of a key."""
    return {"x": np.random.default_rng(number).integers(0, 256, payload_bytes, np.uint8), "number": number}


class Host:
    """A daemon behind which `url` is, and a client of it.

    Args:
        prefix: what the daemon is run under, such as ["ip", "netns", "exec", "name"].
    """

    def __init__(self, url: str, *, prefix: list[str] | None = None, **settings: object) -> None:
        # A machine that is full with other things refuses no put here.
        defaults: dict[str, object] = {"ring_bytes": 64 * MIB, "remote_timeout_s": LONG_S, "gauges_host": "none"}
        self.daemon = Daemon(remote_url=url, **{**defaults, **settings})
        self.daemon.prefix = prefix or []
        self.computed: list[int] = []
        self._own = count(10_000 + next(_hosts) * 1_000_000)

    def start(self) -> Self:
        self.daemon.start()
        self.client = self.daemon.client(timeout_s=PATIENCE_S)
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.daemon.__exit__()

    def get(self, number: int, payload_bytes: int = 100_000, takes_s: float = LONG_S, generation: int = 0) -> bool:
        """Gets an entry, or computes it, which is said to take so long. Checks its bytes. Whether it was computed."""
        before, name = len(self.computed), key(number, generation)
        found = self.client.get(name)
        if found is None:
            claim = self.client.claim(name, within_s=takes_s)
            until(lambda: claim.state not in ("asked", "waiting"), "the claim is decided")
            if claim.state == "hit":
                found = self.client.get(name)
                assert found is not None, "a hit that is a miss"
            else:
                self.computed.append(number)
                put = self.client.put(name, tree(number, payload_bytes), cost_ms=takes_s * 1e3, wait=True)
                assert put.state in ("stored", "existed", "lost"), put
                claim.stored()
                return True
        check(found, number, payload_bytes)
        found.release()
        return len(self.computed) > before

    def put(self, number: int, payload_bytes: int = 100_000, cost_ms: float = LONG_S * 1e3) -> None:
        assert self.client.put(key(number), tree(number, payload_bytes), cost_ms=cost_ms, wait=True).state == "stored"

    def chain(self, entries: int, payload_bytes: int = 100_000) -> list[bytes]:
        """Stores entries, each the parent of the next, and waits until they are in the store."""
        for number in range(entries):
            parent = key(number - 1) if number else None
            put = self.client.put(
                key(number), tree(number, payload_bytes), cost_ms=LONG_S * 1e3, parent=parent, wait=True
            )
            assert put.state == "stored", put
        self.counted("written", entries)
        return [key(number) for number in range(entries)]

    def misses(self) -> bool:
        """Computes an entry that no host has."""
        return self.get(next(self._own))

    def uses_store(self, *, uses: bool) -> None:
        """Waits until it uses the store, or leaves it alone. It misses keys of its own meanwhile."""
        until(lambda: self.misses() and self.remote()["serves"] is uses, f"the store to be used: {uses}")

    def remote(self) -> dict[str, Any]:
        """The remote store as this host's status has it."""
        status = self.daemon.status()
        remote: dict[str, Any] = {**status["remote"], **status["store"]["remote"]}
        return remote

    def counted(self, outcome: str, times: int = 1) -> None:
        """Waits until so many fetches or writes have ended so."""
        until(lambda: self.remote().get(outcome, 0) >= times, f"{times} times {outcome!r}", PATIENCE_S)

    def written(self, times: int, number: int, generation: int = 0) -> None:
        """Waits until so many entries were written, one of them `number`. It is used meanwhile: it was dropped if the
        host did not yet know that it may share the entry, and its use offers it again."""

        def done() -> bool:
            if self.remote().get("written", 0) >= times:
                return True
            assert not self.get(number, generation=generation), "it is in the ring"
            return False

        until(done, f"{times} times 'written'")

    def idle(self) -> None:
        """Waits until nothing is read from the store, written to it or removed, or waits to be."""
        until(
            lambda: not any(self.remote()[name] for name in ("fetches", "writes", "queued", "removals")),
            "the remote work ends",
        )


def check(lease: Any, number: int, payload_bytes: int = 100_000) -> None:
    """Whether a lease has the payload of its key."""
    found = lease.tree
    assert found["number"] == number
    np.testing.assert_array_equal(found["x"], tree(number, payload_bytes)["x"])


def aside(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Runs a call in a thread. Its outcome, or its error, is the list's one item once the thread has ended."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome
