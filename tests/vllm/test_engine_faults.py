"""An engine never dies of its cache: whatever becomes of the daemon, answers are right, and sharing goes on later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tensord

from ..daemon_process import MIB, RING_BYTES
from .conftest import Stand, encoding, fresh, teach_patience
from .engine import Engine

StartEngine = Callable[..., Engine]


@pytest.fixture(autouse=True)
def sharing_goes_on(stand: Stand) -> Iterator[None]:
    """After each test, and with the daemon back, what the first engine encodes the second does not."""
    yield
    stand.mended()
    picture = fresh()
    right = stand.plain.generate(picture)
    answered, _ = stand.encode(stand.first, picture)
    with encoding(stand.second) as by_second:
        assert stand.second.generate(picture) == answered == right
        assert by_second() == 0
    stand.unpinned()


def test_engines_that_were_started_without_a_daemon_answer_and_share_once_it_is_there(stand: Stand) -> None:
    assert stand.before == stand.plain.generate(stand.before_picture)


def test_a_daemon_killed_between_two_requests_changes_no_answer(stand: Stand) -> None:
    picture, another = fresh(), fresh()
    stand.encode(stand.first, picture)
    stand.daemon.kill()
    assert stand.second.generate(picture) == stand.plain.generate(picture)
    assert stand.second.generate(another) == stand.plain.generate(another)
    assert stand.second.generate() == stand.plain.generate()


def test_a_daemon_killed_while_an_engine_encodes_changes_no_answer(stand: Stand) -> None:
    picture = fresh()
    right = stand.plain.generate(picture)
    _begin_and_stop(stand.first, picture, "encode")
    stand.daemon.kill()
    stand.first.go()
    assert stand.first.result() == right


def test_a_daemon_killed_while_an_engine_waits_for_another_changes_no_answer(stand: Stand) -> None:
    picture = fresh()
    right = stand.plain.generate(picture)
    teach_patience(stand.first, stand.second)
    _begin_and_stop(stand.first, picture, "encode")
    stand.second.begin(picture)
    stand.daemon.until(lambda status: status["store"]["claims_waiting"], "the second engine waits for the first")
    stand.daemon.kill()
    assert stand.second.result() == right
    stand.first.go()
    assert stand.first.result() == right


@pytest.mark.parametrize("place", ["hit", "scheduled"])
def test_a_daemon_killed_after_a_hit_was_promised_changes_no_answer(stand: Stand, place: str) -> None:
    picture = fresh()
    right, _ = stand.encode(stand.first, picture)
    with encoding(stand.second) as by_second:
        _begin_and_stop(stand.second, picture, place)
        stand.daemon.kill()
        stand.second.go()
        assert stand.second.result() == right
        assert by_second() == 0


@pytest.mark.parametrize("place", ["hit", "scheduled"])
def test_a_daemon_replaced_after_a_hit_was_promised_changes_no_answer(stand: Stand, place: str) -> None:
    picture = fresh()
    right, _ = stand.encode(stand.first, picture)
    _begin_and_stop(stand.second, picture, place)
    stand.daemon.interrupt()  # takes its memory with it
    stand.daemon.start()
    stand.second.go()
    assert stand.second.result() == right


@pytest.mark.parametrize("place", ["hit", "scheduled"])
def test_an_entry_evicted_after_a_hit_was_promised_changes_no_answer(
    stand: Stand, client: tensord.Client, place: str
) -> None:
    picture = fresh()
    right, key = stand.encode(stand.first, picture)
    with encoding(stand.second) as by_second:
        _begin_and_stop(stand.second, picture, place)
        assert client.evict(key) == 1
        _overwrite(client)
        stand.second.go()
        assert stand.second.result() == right
        assert by_second() == 0


def test_a_daemon_that_does_not_move_changes_no_answer(stand: Stand) -> None:
    there, new = fresh(), fresh()
    stand.encode(stand.first, there)
    stand.daemon.pause()
    with encoding(stand.second) as by_second:
        assert stand.second.generate(there) == stand.plain.generate(there)
        assert by_second() == 0, "a hit needs no daemon"
        assert stand.second.generate(new) == stand.plain.generate(new)
        assert stand.second.generate() == stand.plain.generate()


def test_an_engine_killed_while_it_encodes_leaves_nobody_waiting(
    stand: Stand, model: Path, start_engine: StartEngine
) -> None:
    picture = fresh()
    teach_patience(stand.second)
    with start_engine(model, socket=stand.daemon.socket) as dying:
        dying.wait_up()
        stand.attached(dying)
        _begin_and_stop(dying, picture, "encode")
        stand.second.begin(picture)
        stand.daemon.until(
            lambda status: status["store"]["claims_waiting"], "the second engine waits for the dying one"
        )
        dying.kill()
        assert stand.second.result() == stand.plain.generate(picture)
    stand.daemon.until(lambda status: status["store"]["claims_held"] == 0, "no claim is left")


def _begin_and_stop(engine: Engine, picture: int, place: str) -> None:
    engine.stop_at(place)
    engine.begin(picture)
    assert engine.stopped() == place


def _overwrite(client: tensord.Client) -> list[bytes]:
    """Writes the whole ring over, but for what is pinned, and gives the keys that were used."""
    namespace = tensord.Namespace(model="noise", revision="1", dtype="uint8", processor="none")
    noise = np.full(MIB // 2, 0xA5, np.uint8)
    keys = [namespace.key("encoder", "image", number.to_bytes(4)) for number in range(2 * RING_BYTES // len(noise))]
    for key in keys:
        client.put(key, noise, wait=True, timeout_s=30)
    return keys
