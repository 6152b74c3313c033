"""After a change of weights an engine shares nothing, and no output of the old ones is used."""

from __future__ import annotations

import pytest

from tests.daemon_process import Daemon, until

from ..step_bench import Steps, attached, other_name, request, right
from .stand import encode, fresh, keys

pytestmark = pytest.mark.usefixtures("patient")


def test_an_engine_whose_weights_changed_shares_nothing_and_others_go_on(
    shared: Daemon, apart: tuple[Steps, Steps]
) -> None:
    first, second = apart
    picture, another = fresh(), fresh()
    encode(first, picture)
    # Only this engine's: a reset of its manager is heard by all engines of a process.
    second.connector._caches_reset(weights_kept=False)
    until(lambda: not keys(shared), "what is stored to be dropped")
    for _ in range(2):
        asked = request(picture)
        assert right([asked], second.run(asked))
    assert second.encoded == [f"picture-{picture}"]
    assert not keys(shared)
    encode(first, another)
    with Steps(other_name(shared.socket, 2)) as third:
        attached(third)
        asked = request(another)
        assert right([asked], third.run(asked))
        assert third.encoded == []


def test_what_is_stored_is_dropped_once_there_is_a_daemon_again() -> None:
    with Daemon() as daemon, Steps(daemon.start().socket) as one:
        attached(one)
        picture = fresh()
        encode(one, picture)
        daemon.kill()
        one.manager.reset()
        asked = request(picture)
        assert right([asked], one.run(asked))
        daemon.start()
        until(lambda: not keys(daemon), "what is stored to be dropped")
