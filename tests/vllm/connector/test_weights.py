"""After a change of weights no output of the old ones is used."""

from __future__ import annotations

import pytest

from tests.daemon_process import Daemon, until

from ..step_bench import Steps, attached, feature, item, other_name, request, right
from .stand import connected, encode, fresh, nothing_left

pytestmark = pytest.mark.usefixtures("patient")


def test_after_new_weights_nothing_old_is_used_and_what_the_new_ones_make_is_found_again(
    apart: tuple[Steps, Steps],
) -> None:
    first, second = apart
    picture = fresh()
    encode(first, picture)
    second.manager.reset()
    # Told several times of one change.
    second.manager.reset()
    before = list(second.encoded)
    encode(second, picture)
    asked = request(feature(item(picture), f"again-{picture}"))
    assert right([asked], second.run(asked))
    assert second.encoded == [*before, f"picture-{picture}"]
    nothing_left(second)


def test_engines_whose_weights_changed_as_often_do_not_take_them_for_the_same(apart: tuple[Steps, Steps]) -> None:
    first, second = apart
    picture = fresh()
    encode(first, fresh())
    for _ in range(2):
        first.manager.reset()
        encode(first, picture)
        # It hears of its changes later, or has gone through others: its weights may be any.
        second.manager.reset()
        before = list(second.encoded)
        asked = request(picture)
        assert right([asked], second.run(asked))
        assert second.encoded == [*before, f"picture-{picture}"]
        nothing_left(second)


def test_engines_whose_weights_stay_go_on_sharing_when_anothers_change(
    shared: Daemon, apart: tuple[Steps, Steps]
) -> None:
    first, second = apart
    encode(first, fresh())
    # Only this engine's: a reset of its manager is heard by all engines of a process.
    side = first.connector._scheduler
    assert side is not None
    side._lookups.weights_changed()
    encode(first, fresh())
    picture = fresh()
    encode(second, picture)
    with Steps(other_name(shared.socket, 2)) as third:
        attached(third)
        asked = request(picture)
        assert right([asked], third.run(asked))
        assert third.encoded == []


def test_until_the_daemon_has_confirmed_new_weights_nothing_is_shared() -> None:
    with Daemon() as daemon, Steps(daemon.socket) as one:
        daemon.start()
        until(lambda: connected(one), "it to be attached")
        picture = fresh()
        encode(one, picture)
        daemon.kill()
        one.manager.reset()
        for _ in range(2):
            asked = request(picture)
            assert right([asked], one.run(asked))
            one.manager.reset()
        assert one.encoded == [f"picture-{picture}"] * 3
        daemon.start()
        until(lambda: connected(one), "it to be attached")
        asked = request(picture)
        assert right([asked], one.run(asked))
        # The old entry is not found: it is under the old generation, if it is there at all.
        assert one.encoded == [f"picture-{picture}"] * 4


def test_a_request_that_waits_when_weights_change_goes_on_with_the_new_ones(apart: tuple[Steps, Steps]) -> None:
    first, second = apart
    picture = fresh()
    encode(first, picture)
    second.has_blocks = False
    asked = second.add(request(picture))
    until(lambda: second.step() is not None and second.held["leases"], "the lease")
    second.manager.reset()
    assert second.held["leases"] == 0
    second.has_blocks = True
    before = list(second.encoded)
    until(lambda: asked.request_id in second.step(), "its first step")
    assert second.encoded == [*before, f"picture-{picture}"]
