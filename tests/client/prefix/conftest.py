"""A daemon for all tests of a file, and a prefix cache with a namespace of its own for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tensord
from tensord import PrefixCache

from ...daemon_process import MIB, Daemon
from .sequences import BLOCK, namespace_of, numbers


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(ring_bytes=32 * MIB, gauges_host="none") as running:
        yield running.start()


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> tensord.Client:
    return daemon.client()


@pytest.fixture
def namespace() -> tensord.Namespace:
    return namespace_of(next(numbers))


@pytest.fixture
def cache(client: tensord.Client, namespace: tensord.Namespace) -> PrefixCache:
    return PrefixCache(client, namespace, block_tokens=BLOCK)
