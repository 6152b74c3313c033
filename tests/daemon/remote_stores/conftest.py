"""A redis-server, and stores that are closed when a test is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from tensord.daemon.remote_stores.store import RemoteStore, open_store

from .conformance import Backend
from .servers import RedisServer

Opened = Callable[..., RemoteStore]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """`open_store`, for the time of a test."""
    with ExitStack() as stores:
        yield lambda *about: stores.enter_context(closing(open_store(*about)))


@pytest.fixture
def store(backend: Backend) -> Iterator[RemoteStore]:
    with closing(backend.open()) as store:
        yield store


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started
