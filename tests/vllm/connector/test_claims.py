"""Of several engines that need the same output one encodes it, and the others wait for it, if that is sooner."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tensord.client.core.client import Client
from tensord.client.vllm.encoder.pace import SOONER
from tensord.client.vllm.engine.background import Background, Job
from tests.daemon_process import PATIENCE_S, Daemon, until

from ..conftest import fresh
from ..step_bench import ROWS, Steps, answers, other_name, request, right
from .stand import counted, settled

pytestmark = pytest.mark.usefixtures("patient")


# ---- compute once


def test_an_engine_waits_for_a_picture_that_another_encodes(first: Steps, second: Steps) -> None:
    picture = fresh()
    settled(first, first.add(request(picture)))
    second.add(waiting := request(picture))
    before = list(second.encoded)
    until(lambda: second.step() is not None and counted(second, "waits"), "the other to wait")
    until(first.step, "the picture to be encoded")
    assert right([waiting], answers([second], waiting))
    assert second.encoded == before


def test_waiting_ends_at_its_bound(shared: Daemon) -> None:
    picture = fresh()
    with (
        Steps(shared.socket) as one,
        Steps(other_name(shared.socket, 1), wait_s_max=0.5) as another,
    ):
        settled(one, one.add(request(picture)))
        asked = request(picture)
        assert right([asked], another.run(asked))
        assert another.encoded == [f"picture-{picture}"]
        assert counted(another, "wait_timeouts") == 1


def test_nobody_waits_for_what_the_engine_itself_is_storing(first: Steps) -> None:
    picture = fresh()
    one, another = request(picture), request(picture)
    settled(first, first.add(one))
    # It is looked up before the first is scheduled, and found to be missing while that stores what it encoded.
    first.add(another)
    stored = threading.Event()
    worker = first.workers[0]._worker
    assert worker is not None and worker._background.post(lambda _: stored.wait(PATIENCE_S))
    try:
        assert one.request_id in first.step()
        first.step()
        assert another.num_computed_tokens, "it is put off, though the engine has the picture"
    finally:
        stored.set()


def test_engines_that_want_the_same_pictures_in_another_order_do_not_wait_in_a_circle(
    first: Steps, second: Steps
) -> None:
    pictures = [fresh() for _ in range(4)]
    one, another = request(*pictures), request(*reversed(pictures))
    before = len(first.encoded) + len(second.encoded)
    first.add(one)
    second.add(another)
    assert right([one, another], answers([first, second], one, another))
    assert len(first.encoded) + len(second.encoded) - before == len(pictures)
    assert not counted(first, "wait_timeouts") and not counted(second, "wait_timeouts")


def test_a_claim_is_asked_for_however_soon_the_background_thread_takes_its_job(
    shared: Daemon, first: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = Background.post

    def done_at_once(background: Background, job: Job) -> bool:
        done = threading.Event()

        def then(client: Client) -> None:
            try:
                job(client)
            finally:
                done.set()

        return post(background, then) and done.wait(PATIENCE_S)

    monkeypatch.setattr(Background, "post", done_at_once)
    settled(first, first.add(request(fresh())))
    assert shared.store("claims_held") == 1


# ---- how long another engine is waited for


@pytest.fixture
def comparing(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As outside of tests, engines do not wait for one that they take for slower."""
    monkeypatch.setattr("tensord.client.vllm.encoder.pace.SOONER", SOONER)


@pytest.mark.usefixtures("comparing")
@pytest.mark.parametrize(("takes_s", "waits"), [(10.0, 3), (1.0, 0)], ids=["as long", "less"])
def test_an_engine_waits_for_one_that_takes_as_long_and_not_if_it_would_take_less(
    apart: tuple[Steps, Steps], takes_s: float, waits: int
) -> None:
    first, second = apart
    for engine, engine_s in ((first, 10.0), (second, takes_s)):
        side = engine.connector._scheduler
        assert side is not None
        side._pace.row_s = engine_s / ROWS
    for _ in range(3):
        picture = fresh()
        settled(first, first.add(request(picture)))
        second.add(asked := request(picture))
    if waits:
        until(lambda: second.step() is not None and counted(second, "waits") == waits, "three that wait")
    else:
        until(lambda: asked.request_id in second.step(), "the request to be scheduled while the other has the claim")
        assert first.held["claims"] == 3
    assert (counted(second, "waits"), counted(second, "overtaken")) == (waits, 3 - waits)


def test_an_engine_claims_what_a_step_of_it_takes_and_leaves_the_rest_to_others(shared: Daemon) -> None:
    def narrow(config: Any) -> None:
        config.scheduler_config.max_num_seqs = 2

    pictures = [fresh() for _ in range(4)]
    with (
        Steps(shared.socket, change=narrow) as one,
        Steps(other_name(shared.socket, 1), change=narrow) as another,
    ):
        one.has_blocks = another.has_blocks = False
        for picture in pictures:
            one.add(request(picture))
        until(lambda: one.step() is not None and shared.store("claims_held") == 2, "two claims")
        for picture in pictures:
            another.add(request(picture))
        until(lambda: another.step() is not None and shared.store("claims_held") == 4, "the other's two")
        assert one.held["claims"] == 2
        one.has_blocks = another.has_blocks = True
        asked = [*one.requests.values(), *another.requests.values()]
        assert right(asked, answers([one, another], *asked))
        assert len(one.encoded) + len(another.encoded) == len(pictures)
