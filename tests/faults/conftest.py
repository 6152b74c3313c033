"""Daemons that several tests of faults start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..daemon_process import Daemon
from .payloads import key, payload
from .small_ring import PINNED, RING_BYTES, UNPINNED


@pytest.fixture
def small() -> Iterator[Daemon]:
    with Daemon(ring_bytes=RING_BYTES, policy="lru") as running:
        running.start()
        writer = running.client()
        for number in (PINNED, UNPINNED):
            assert writer.put(key(number), payload(number), wait=True).state == "stored"
        writer.close()
        yield running
