"""A host for tests of the remote store."""

from __future__ import annotations

import pytest

from .stand import REMOTE, RemoteStand


@pytest.fixture
def stand() -> RemoteStand:
    """A host whose remote store has answered it already, and for which it waits for 2 s at most."""
    return RemoteStand(**REMOTE)
