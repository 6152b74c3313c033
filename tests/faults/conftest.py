"""A daemon with an entry that a test of faults views, in a ring of 2 MiB."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..daemon_process import MIB, Daemon
from .payloads import PINNED, key, payload


@pytest.fixture
def small() -> Iterator[Daemon]:
    with Daemon(ring_bytes=2 * MIB, policy="lru") as running:
        running.start()
        with running.client() as writer:
            assert writer.put(key(PINNED), payload(PINNED), wait=True).state == "stored"
        yield running
