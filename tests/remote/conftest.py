"""What all tests of hosts share: `make test-remote` runs them, and the network is the demonstration's, whose folder is
put on the path here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..daemon.remote_stores.redis_server import RedisServer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


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
