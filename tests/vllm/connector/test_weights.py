"""After a change of weights an engine shares nothing, and no output of the old ones is used."""

from __future__ import annotations

import pytest

from tests.daemon_process import Daemon, until

from ..conftest import keys
from ..step_bench import Steps, attached, other_name
from .stand import encode, finds

pytestmark = pytest.mark.usefixtures("patient")


def test_an_engine_whose_weights_changed_shares_nothing_and_others_go_on(
    shared: Daemon, apart: tuple[Steps, Steps]
) -> None:
    first, second = apart
    picture = encode(first)
    # Only this engine's: a reset of its manager is heard by all engines of a process.
    second.connector._caches_reset(weights_kept=False)
    until(lambda: not keys(shared), "what is stored to be dropped")
    assert [finds(second, picture), finds(second, picture)] == [False, True], "its own cache has it"
    assert not keys(shared)
    another = encode(first)
    with Steps(other_name(shared.socket, 2)) as third:
        attached(third)
        assert finds(third, another)


def test_what_is_stored_is_dropped_once_there_is_a_daemon_again() -> None:
    with Daemon() as daemon, Steps(daemon.start().socket) as one:
        attached(one)
        picture = encode(one)
        daemon.kill()
        one.manager.reset()
        assert not finds(one, picture)
        daemon.start()
        until(lambda: not keys(daemon), "what is stored to be dropped")
