"""Socket pairs, and a count of descriptors around every test."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator

import pytest
import uvloop

from tests.daemon_process import until

# libuv opens a pipe once and for all with the first loop: that is no leak of a test's.
uvloop.new_event_loop().close()


def open_descriptors() -> dict[str, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            pass  # the listing's own
    return found


@pytest.fixture
def no_descriptor_leaks() -> Iterator[None]:
    """Fails a test that leaves descriptors open. Ask for it before the fixtures it shall see."""
    gc.collect()
    before = open_descriptors()
    yield
    gc.collect()
    # Another test's thread may still be about to close one.
    until(lambda: open_descriptors().items() <= before.items(), "what was opened to be closed")
    assert open_descriptors() == before


@pytest.fixture
def sockets(no_descriptor_leaks: None) -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    yield ours, theirs
    ours.close()
    theirs.close()
