"""One daemon, and two engines reduced to their steps, for the tests of each module. A test takes pictures that nobody
asked for before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.daemon_process import Daemon

from ..step_bench import Steps, attached, other_name
from .stand import nothing_left


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    with Daemon() as running:
        yield running.start()


@pytest.fixture(scope="module")
def stand(shared: Daemon) -> Iterator[tuple[Steps, Steps]]:
    with Steps(shared.socket) as first, Steps(other_name(shared.socket, 1)) as second:
        yield first, second


@pytest.fixture
def first(pair: tuple[Steps, Steps]) -> Steps:
    return pair[0]


@pytest.fixture
def second(pair: tuple[Steps, Steps]) -> Steps:
    return pair[1]


@pytest.fixture
def apart(shared: Daemon) -> Iterator[tuple[Steps, Steps]]:
    """Two engines of a test's own: those whose weights change share with nobody afterwards."""
    with Steps(shared.socket) as one, Steps(other_name(shared.socket, 1)) as another:
        attached(one)
        attached(another)
        yield one, another


@pytest.fixture
def pair(shared: Daemon, stand: tuple[Steps, Steps]) -> Iterator[tuple[Steps, Steps]]:
    """Two engines with one model and a client each, of which nothing may be left at the end."""
    for engine in stand:
        # Whatever mapped rings they were to say is said.
        attached(engine)
    yield stand
    for engine in stand:
        engine.has_blocks = True
        engine.finish(*list(engine.requests.values()))
        nothing_left(engine)
    shared.until(
        lambda s: s["pins"] == s["store"]["claims_held"] == s["store"]["claims_waiting"] == 0, "nothing to be held"
    )
