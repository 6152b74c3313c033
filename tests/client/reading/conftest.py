"""Ring, index and lanes in this process, for all tests of readers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ...memory_bench import MemoryBench


@pytest.fixture
def bench() -> Iterator[MemoryBench]:
    with MemoryBench() as made:
        yield made
