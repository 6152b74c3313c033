"""These tests need transformers and torch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

import tensord

from ..daemon_process import Daemon

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(ring_bytes="64MiB") as running:
        yield running.start()


@pytest.fixture
def client(daemon: Daemon) -> tensord.Client:
    """With an empty cache."""
    client = daemon.client()
    client.clear()
    return client


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    import torch

    with torch.no_grad():
        yield


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """For tiny models on busy cores, more take many times as long."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
