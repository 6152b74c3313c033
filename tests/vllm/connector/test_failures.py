"""Daemons that are away, rings that are full, loads that fail, weights that change, and any course of events: answers
stay right."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensord.client.link.answers import Answers
from tensord.client.vllm.engine import rings
from tests.daemon_process import MIB, PATIENCE_S, Daemon, until

from ..conftest import fresh, keys
from ..step_bench import Steps, attached, feature, item, other_name, request, right
from .stand import connected, counted, encode, finds, nothing_left, settled

pytestmark = pytest.mark.usefixtures("patient")


# ---- the daemon goes away


def test_the_daemon_killed_between_steps_means_misses_until_it_is_back() -> None:
    with Daemon() as daemon, Steps(daemon.start().socket) as one, Steps(other_name(daemon.socket, 1)) as another:
        picture = encode(one)
        asked = another.add(request(picture))
        settled(another, asked)
        # The scheduler has said hit.
        results = another.step(between=daemon.kill)
        assert right([asked], [results[asked.request_id]])
        assert another.encoded == []
        assert not finds(one, fresh())
        daemon.start()
        until(lambda: all(connected(engine) for engine in (one, another)), "both to be attached")
        assert finds(another, picture)
        assert finds(another, encode(one))


def test_a_ring_that_was_replaced_is_unmapped_and_what_a_request_holds_of_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Daemon() as daemon, ExitStack() as engines:
        daemon.start()
        one = engines.enter_context(Steps(daemon.socket, ranks=2))
        another = engines.enter_context(Steps(other_name(daemon.socket, 1), ranks=2))
        for _ in range(3):
            for engine in (one, another):
                _is_told(engine)
            asked = another.add(request(encode(one)))
            settled(another, asked)
            daemon.interrupt()
            daemon.start()
            # The request waits for blocks, and holds what it found in the old ring.
            another.has_blocks = False
            _is_told(another)
            another.has_blocks = True
            before = list(another.encoded)
            assert right([asked], another.run(asked))
            assert another.encoded == before, "it was loaded"
            another.finish(*list(another.requests.values()))
        for engine in (one, another):
            _is_told(engine)
            encode(engine)
        monkeypatch.setattr(rings, "KEPT_S", 0.0)
        until(lambda: _rings_mapped(daemon) == 1, "only the new ring to be mapped")


def _is_told(engine: Steps) -> None:
    """Returns when the scheduler knows that all workers map the ring of now, and no other."""
    side = engine.connector._scheduler
    assert side is not None

    def told() -> bool:
        engine.step()
        view = side._background.view if connected(engine) else None
        return view is not None and side._plan.rings == dict.fromkeys(range(len(engine.workers)), view.ring.identity)

    until(told, "workers to map the ring of now")


def _rings_mapped(daemon: Daemon) -> int:
    """How many rings of a daemon's this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if f"{daemon.instance}.ring" in line})


def test_a_stopped_daemon_keeps_no_step_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensord.client.vllm.engine.background.LATE_S", 0.25)
    monkeypatch.setattr("tensord.client.vllm.encoder.scheduler.LATE_S", 0.02)
    askers: list[threading.Thread] = []
    ask = Answers.ask

    def asked_by(answers: Answers, *about: Any, **more: Any) -> Any:
        askers.append(threading.current_thread())
        return ask(answers, *about, **more)

    monkeypatch.setattr(Answers, "ask", asked_by)
    with Daemon() as daemon, Steps(daemon.start().socket) as one:
        attached(one)
        daemon.pause()
        try:
            assert not any(finds(one, fresh()) for _ in range(5))
            assert askers and threading.current_thread() not in askers
            assert len(one.encoded) == 5
        finally:
            daemon.resume()
        nothing_left(one)
        until(lambda: connected(one), "the daemon to answer again")
        encode(one)


def test_a_full_ring_refuses_and_a_waiting_engine_learns_it_at_once_though_the_other_makes_no_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tensord.client.vllm.encoder.claims.SAVE_S", 10 * PATIENCE_S)
    rows = 2048
    with Daemon(ring_bytes=2 * MIB) as daemon, ExitStack() as engines:
        client = daemon.start().client()
        one = engines.enter_context(Steps(daemon.socket, capacity=1 << 20))
        another = engines.enter_context(Steps(other_name(daemon.socket, 1), capacity=1 << 20))
        attached(one)
        assert client.put(b"k" * 32, np.zeros(int(1.9 * MIB), np.uint8), wait=True).state == "stored"
        pinned = client.get(b"k" * 32)
        assert pinned is not None
        large = feature(item(fresh(), rows), "large", rows=rows)
        settled(one, one.add(asked := request(large)))
        another.add(waiting := request(large))
        until(lambda: another.step() is not None and daemon.store("claims_waiting"), "the other to wait")
        results = until(one.step, "the picture to be encoded")
        assert right([asked], [results[asked.request_id]])
        until(lambda: waiting.request_id in another.step(), "the other not to wait any longer")
        assert another.encoded == ["large"]
        assert not counted(another, "wait_timeouts")
        for engine in (one, another):
            until(lambda engine=engine: counted(engine, "refused"), "the refusal")  # type: ignore[misc]
            engine.finish(*list(engine.requests.values()))
            nothing_left(engine)
        daemon.until(lambda status: not status["store"]["claims_held"], "the claims to be over")


# ---- loads that fail


def test_a_load_that_fails_ends_its_request_and_those_that_ask_for_that_picture_later(
    apart: tuple[Steps, Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = apart
    picture = encode(first)
    asked = second.add(request(picture))
    settled(second, asked)
    worker = second.workers[0]._worker
    assert worker is not None
    with monkeypatch.context() as broken:
        broken.setattr(worker, "_read", lambda load: None)
        assert torch.count_nonzero(second.step()[asked.request_id][0]) == 0
    until(lambda: second.step() is not None and asked.request_id in second.failed, "the request to be ended")
    again = second.add(request(picture))
    until(lambda: second.step() == {} and again.request_id in second.failed, "the next one to be ended")
    second.reset()
    finds(second, picture)
    assert counted(second, "load_failures") == 1


# ---- after a change of weights


def test_an_engine_whose_weights_changed_shares_nothing_and_others_go_on(
    shared: Daemon, apart: tuple[Steps, Steps]
) -> None:
    first, second = apart
    picture = encode(first)
    # Only this engine's: a reset is heard by all engines of a process.
    side = second.connector._scheduler
    assert side is not None
    side.caches_reset(weights_kept=False)
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
        one.reset()
        assert not finds(one, picture)
        daemon.start()
        until(lambda: not keys(daemon), "what is stored to be dropped")


# ---- whatever happens, in whatever order


ACTS = st.sampled_from(["add", "add", "step", "step", "other", "abort", "preempt", "starve", "feed", "reset"])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=st.lists(st.tuples(ACTS, st.integers(0, 3)), min_size=1, max_size=25))
def test_after_any_course_of_events_answers_are_right_and_nothing_is_held(
    shared: Daemon, acts: list[tuple[str, int]]
) -> None:
    # Engines of its own for each course: those whose weights changed share nothing in the next one.
    with Steps(shared.socket) as first, Steps(other_name(shared.socket, 1)) as second:
        _go_through(first, second, acts)
        shared.until(lambda s: s["pins"] == s["store"]["claims_held"] == s["store"]["claims_waiting"] == 0, "no trace")


def _go_through(first: Steps, second: Steps, acts: list[tuple[str, int]]) -> None:
    pictures = [fresh() for _ in range(4)]
    asked: dict[str, Any] = {}
    for act, number in acts:
        engine = second if act == "other" else first
        running = list(engine.requests.values())
        if act in ("add", "other"):
            made = engine.add(request(pictures[number], pictures[(number + 1) % 4]))
            asked[made.request_id] = made
        elif act == "abort" and running:
            engine.finish(running[number % len(running)])
        elif act == "preempt" and running:
            one = running[number % len(running)]
            engine.manager.free(one)
            one.num_computed_tokens = 0
        elif act in ("starve", "feed"):
            engine.has_blocks = act == "feed"
        elif act == "reset":
            engine.reset(weights_kept=bool(number % 2))
        for moved in (first, second):
            for name, found in moved.step().items():
                assert right([asked[name]], [found])
    first.has_blocks = second.has_blocks = True
    until(lambda: _all_ran(first, asked) & _all_ran(second, asked), "all to be answered")
    for engine in (first, second):
        engine.finish(*list(engine.requests.values()))
        nothing_left(engine)


def _all_ran(engine: Steps, asked: dict[str, Any]) -> bool:
    for name, found in engine.step().items():
        assert right([asked[name]], [found])
    return all(one.num_computed_tokens for one in engine.requests.values())
