"""What every part's tests share: a real daemon, ready to serve."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .daemon_process import Daemon


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon with a ring of 16 MiB."""
    with Daemon() as running:
        yield running.start()
