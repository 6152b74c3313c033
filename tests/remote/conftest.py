"""What all tests of hosts share: `make test-remote` runs them, and the network is the demonstration's, whose folder is
put on the path here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ..daemon.remote_stores.servers import RedisServer
from .hosts import LONG_S, Host

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from hosts_network import Network, missing

HOSTS = 3


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all tests of this folder; the hook is given those of other folders, too."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.network)


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.fixture
def network() -> Iterator[Network]:
    if why := missing():
        pytest.skip(why)
    with Network(HOSTS) as network:
        yield network


@pytest.fixture
def timeout_s() -> float:
    """How long a host waits for the store."""
    return LONG_S


@pytest.fixture
def around(network: Network, timeout_s: float) -> Iterator[Callable[[str], list[Host]]]:
    """Starts a host at each address of the network, around a store."""
    with ExitStack() as stack:
        yield lambda url: [
            stack.enter_context(Host(url, prefix=network.host(number), remote_timeout_s=timeout_s))
            for number in range(HOSTS)
        ]
