"""Chains: entries that name their parent by its key. No entry is found without its parent, also after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

import tensord

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from .payloads import key, payload

CHAINS = 20
LENGTH = 12


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(ring_bytes=64 * MIB) as running:
        yield running.start()


def chain(number: int, length: int = LENGTH) -> list[int]:
    """The numbers of a chain's entries, the first one first."""
    return [1000 * number + at for at in range(length)]


def put_chain(client: tensord.Client, numbers: list[int], size_bytes: int = 16 << 10) -> list[tensord.Put]:
    """Puts a chain in order, without waiting."""
    parent = None
    sent = []
    for number in numbers:
        sent.append(client.put(key(number), payload(number, size_bytes), parent=parent, timeout_s=PATIENCE_S))
        parent = key(number)
    return sent


def stored(client: tensord.Client, numbers: list[int]) -> list[bool]:
    return [client.contains(key(number)) for number in numbers]


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_the_next_daemon_knows_the_links_of_all_chains(end: str) -> None:
    with Daemon(ring_bytes=16 * MIB) as daemon:
        client = daemon.start().client(timeout_s=PATIENCE_S)
        for number in range(CHAINS):
            assert [put.wait(PATIENCE_S).state for put in put_chain(client, chain(number))] == ["stored"] * LENGTH
        for _ in range(2):
            getattr(daemon, end)()
            daemon.start()
            daemon.attached(client)
        assert daemon.store("found_corrupt") == 0
        for number in range(CHAINS):
            assert all(stored(client, chain(number)))
        # The links are known: a chain ends with its first entry, and goes on after its last one.
        client.evict(key(0))
        until(lambda: not any(stored(client, chain(0))), "the whole chain to end")
        last = chain(1)[-1]
        assert client.put(key(999_999), payload(1), parent=key(last), wait=True).state == "stored"
        # The ring is filled five times over: entries go from the ends of their chains.
        for number in range(2000, 2000 + 5 * 16 * MIB // (256 << 10)):
            client.put(key(number), np.zeros(256 << 10, np.uint8), wait=True, timeout_s=PATIENCE_S)
            if number % 20 == 0:
                whole(client)
        whole(client)
        client.close()


def whole(client: tensord.Client) -> None:
    """No entry of a chain is found without its parent. The parents are looked up first: entries end meanwhile."""
    for number in range(CHAINS):
        numbers = chain(number)
        there = dict(zip(numbers, stored(client, numbers), strict=True))
        for parent, child in pairwise(numbers):
            assert there[parent] or not there[child], f"{child} is found, and its parent {parent} is not"
