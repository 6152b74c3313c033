"""The rate of memory at the daemon's start."""

from __future__ import annotations

from tensord.daemon.process.copy_rate import COPY_BYTES, memory_bytes_per_s


def test_the_measured_rate_is_one_that_memory_may_have() -> None:
    assert COPY_BYTES < memory_bytes_per_s() < 1e13
