"""Model Runner V2, what GPUs use by default, calls the connector in its own way: the promises hold there too.

vLLM's own class around the connector, a real daemon, and steps without an engine: the runner itself needs a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.daemon_process import Daemon, until

from ..step_bench import Steps, attached, other_name, request, right
from .stand import fresh, nothing_left

pytestmark = pytest.mark.usefixtures("patient")


def engine(daemon: Daemon, number: int, *about: str, **settings: Any) -> Steps:
    return attached(Steps(other_name(daemon.socket, number), *about, runner="v2", **settings))


def saved(engine: Steps, count: int) -> None:
    """So many saves are reported. A step reports those that ended before it."""
    until(lambda: engine.step() is not None and engine.counts.get("saves", 0) >= count, f"saves: {engine.counts}")
    assert engine.counts["saves"] == count


def test_a_picture_is_encoded_by_one_engine_and_no_hold_stays(daemon: Daemon) -> None:
    with engine(daemon, 1, ranks=2) as first, engine(daemon, 2, ranks=2) as second:
        pictures = [fresh() for _ in range(3)]
        asked = request(*pictures)
        assert right([asked], first.run(asked))
        nothing_left(first)
        saved(first, 3)
        asked = request(*pictures)
        assert right([asked], second.run(asked))
        assert second.encoded == []
        nothing_left(second)
