"""Daemons with a small ring, which forgets what was used longest ago."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ...daemon_process import Daemon


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    """A daemon for all tests that leave it as it was; its ring has 16 MiB."""
    with Daemon(policy="lru", gauges_host="none") as running:
        yield running.start()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon for one test, where `press` leaves nothing that nobody holds."""
    with Daemon(policy="lru", gauges_host="none") as running:
        yield running.start()
