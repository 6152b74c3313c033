"""What the connector promises, with vLLM's own classes around it and a real daemon: steps without an engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.outputs import ECConnectorOutput

import tensord
from tensord.client.vllm import background, claims
from tensord.client.vllm.background import CLIENTS
from tensord.client.vllm.connector import TensordECConnector
from tensord.client.vllm.pace import SOONER
from tensord.client.vllm.scheduler import SchedulerSide
from tensord.client.vllm.settings import Settings
from tensord.client.vllm.stats import COUNTERS, TensordECStats
from tensord.client.vllm.step import NOTHING, Report
from tensord.errors import BadConfiguration
from tests.daemon_process import MIB, PATIENCE_S, Daemon, until
from tests.processes import Child, Stage

from .step_bench import ROWS, Steps, answers, encoded, feature, item, other_name, request, right, vllm_config
from .tiny_llava import WIDTH

_numbers = count(1000)
pytestmark = pytest.mark.usefixtures("patient")
NOTHING_HELD = {"requests": 0, "inputs": 0, "leases": 0, "claims": 0, "steps": 0}


def fresh() -> int:
    """A picture that nobody asked for before."""
    return next(_numbers)


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
        mapped(one)
        mapped(another)
        yield one, another


@pytest.fixture
def pair(shared: Daemon, stand: tuple[Steps, Steps]) -> Iterator[tuple[Steps, Steps]]:
    """Two engines with one model and a client each, of which nothing may be left at the end."""
    for engine in stand:
        # Whatever mapped rings they were to say is said.
        mapped(engine)
    yield stand
    for engine in stand:
        engine.has_blocks = True
        engine.finish(*list(engine.requests.values()))
        nothing_left(engine)
    shared.until(
        lambda s: s["pins"] == s["store"]["claims_held"] == s["store"]["claims_waiting"] == 0, "nothing to be held"
    )


def mapped(engine: Steps) -> None:
    """Returns when all workers have said that they map the ring."""
    side = engine.connector._scheduler
    assert side is not None
    until(lambda: engine.step() is not None and len(side._plan.rings) == len(engine.workers), "workers to map the ring")


def settled(engine: Steps, asked: Any) -> None:
    """Returns when the connector lets the request be scheduled; nothing is scheduled yet."""
    until(lambda: engine.connector.ensure_cache_available(asked, 0), "an answer")


def nothing_left(engine: Steps) -> None:
    until(lambda: engine.step() is not None and engine.held == NOTHING_HELD, f"nothing to be held: {engine.held}")


def encode(engine: Steps, *pictures: int) -> None:
    """Has the engine encode them, and returns when all can have them."""
    before = engine.counts.get("saves", 0)
    asked = request(*pictures)
    assert right([asked], engine.run(asked))
    until(lambda: engine.step() is not None and engine.counts.get("saves", 0) >= before + len(pictures), "saves")


def counted(engine: Steps, name: str) -> float:
    engine.step()
    return engine.counts.get(name, 0)


def keys(daemon: Daemon) -> set[bytes]:
    from tensord.ipc import messages

    rows = daemon.ask(partial(messages.EntriesQuery, count=1000))["entries"]
    return {bytes.fromhex(row["key"]) for row in rows}


# ---- sharing


def test_a_picture_encoded_by_one_engine_is_not_encoded_by_another(first: Steps, second: Steps) -> None:
    picture = fresh()
    encode(first, picture)
    before = list(second.encoded)
    asked = request(picture)
    assert right([asked], second.run(asked))
    assert second.encoded == before
    assert counted(second, "hits") >= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_come_back_bit_for_bit(shared: Daemon, dtype: torch.dtype) -> None:
    picture = fresh()
    with (
        Steps(shared.socket, dtype=dtype, wait_s_max=60) as one,
        Steps(other_name(shared.socket, 1), dtype=dtype) as another,
    ):
        asked = request(picture)
        assert right([asked], one.run(asked), dtype)
        nothing_left(one)
        asked = request(picture)
        assert right([asked], another.run(asked), dtype)
        assert another.encoded == []


def test_a_picture_is_found_under_any_name(first: Steps, second: Steps) -> None:
    picture = fresh()
    encode(first, picture)
    before = list(second.encoded)
    asked = request(feature(item(picture), f"clients-{picture}"))
    assert right([asked], second.run(asked))
    assert second.encoded == before


def test_a_name_used_again_for_another_picture_gives_the_other_picture(first: Steps, second: Steps) -> None:
    one, another = fresh(), fresh()
    name = f"clients-{one}"
    asked = request(feature(item(one), name))
    assert right([asked], first.run(asked))
    nothing_left(first)
    asked = request(feature(item(another), name))
    assert right([asked], second.run(asked))


def test_two_requests_with_one_name_for_two_pictures_never_cross(first: Steps, second: Steps) -> None:
    one, another = fresh(), fresh()
    encode(first, one, another)
    name = f"clients-{one}"
    asked = [request(feature(item(number), name)) for number in (one, another)]
    for wanted in asked:
        second.add(wanted)
        settled(second, wanted)
    side = second.connector._scheduler
    assert side is not None
    for wanted, number in zip(asked, (one, another), strict=True):
        assert second.connector.ensure_cache_available(wanted, 0)
        assert second.connector.has_cache_item(name)
        lease = side._asking[wanted.request_id].inputs[name].lease
        assert lease is not None
        assert np.array_equal(lease.tree, encoded(item(number)).numpy())


def test_one_name_for_two_pictures_in_one_request_is_not_shared(first: Steps) -> None:
    name = f"clients-{fresh()}"
    features = [feature(item(fresh()), name, 1), feature(item(fresh()), name, 2 + ROWS)]
    before = counted(first, "unshared")
    first.run(request(*features))
    assert counted(first, "unshared") == before + 1


def test_a_picture_several_times_in_a_request_is_encoded_once(first: Steps) -> None:
    picture = fresh()
    asked = request(*(feature(item(picture), f"picture-{picture}", 1 + at * (ROWS + 1)) for at in range(4)))
    assert right([asked], first.run(asked))
    assert first.encoded.count(f"picture-{picture}") == 1


def test_an_entry_in_the_engine_s_own_cache_is_not_looked_up(first: Steps) -> None:
    picture = fresh()
    encode(first, picture)
    asked = first.add(request(picture))
    # Not put off, and nothing held for it.
    assert asked.request_id in first.step() or asked.num_computed_tokens
    assert first.held["inputs"] == 0


@pytest.mark.parametrize("data", [None, "handle"])
def test_an_input_whose_content_is_elsewhere_is_not_shared(first: Steps, data: str | None) -> None:
    before = counted(first, "unshared")
    wanted = item(fresh())
    stands_in = None
    if data is not None:
        stands_in = wanted.copy()
        stands_in["address"] = stands_in.pop("pixel_values")
        stands_in["address"].data = 4096  # type: ignore[assignment]
    asked = first.add(request(feature(stands_in, f"clients-{fresh()}")))
    settled(first, asked)
    assert not first.connector.has_cache_item(asked.mm_features[0].identifier)
    assert counted_without_step(first, "unshared") == before + 1
    first.finish(asked)


def counted_without_step(engine: Steps, name: str) -> float:
    stats = engine.connector.get_ec_connector_stats()
    assert stats is not None
    return float(engine.counts.get(name, 0) + stats.data.get(name, 0))


# ---- what does not fit


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (np.zeros((ROWS - 1, WIDTH), np.float32), "rows"),
        (np.zeros((ROWS, WIDTH // 2), np.float32), "width"),
        (np.zeros((ROWS, WIDTH), np.float64), "dtype"),
        (np.zeros((ROWS, WIDTH, 1), np.float32), "form"),
        ({"hidden": np.zeros((ROWS, WIDTH), np.float32)}, "form"),
    ],
    ids=["rows", "width", "dtype", "dimensions", "tree"],
)
def test_an_encoding_of_the_wrong_shape_is_a_miss_and_counted(
    shared: Daemon, first: Steps, second: Steps, stored: Any, reason: str
) -> None:
    picture = fresh()
    there = keys(shared)
    encode(first, picture)
    (key,) = keys(shared) - there
    with tensord.Client(shared.socket) as client:
        client.evict(key)
        assert client.put(key, stored, wait=True).state == "stored"
    before = counted(second, "mismatches"), counted(second, f"mismatch_{reason}")
    asked = request(picture)
    assert right([asked], second.run(asked))
    assert (counted(second, "mismatches"), counted(second, f"mismatch_{reason}")) == (before[0] + 1, before[1] + 1)


def test_an_output_of_another_width_than_the_measured_one_is_a_mismatch(shared: Daemon) -> None:
    def measured(config: Any) -> None:
        config.ec_transfer_config.mm_encoder_output_widths = {"image": 2 * WIDTH}

    picture = fresh()
    with Steps(shared.socket) as one, Steps(other_name(shared.socket, 1), change=measured) as another:
        encode(one, picture)
        another.run(request(picture))
        assert another.encoded == [f"picture-{picture}"]
        assert counted(another, "mismatches") == 1


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


def test_an_engine_that_waits_for_one_that_gives_up_encodes_itself(shared: Daemon, first: Steps, second: Steps) -> None:
    picture = fresh()
    settled(first, first.add(request(picture)))
    second.add(waiting := request(picture))
    until(lambda: second.step() is not None and shared.store("claims_waiting"), "the other to wait")
    first.finish(*list(first.requests.values()))
    until(lambda: waiting.request_id in second.step(), "the other's answer")
    assert second.encoded[-1] == f"picture-{picture}"


def test_an_engine_that_stops_waiting_leaves_nothing_with_the_daemon(
    shared: Daemon, first: Steps, second: Steps
) -> None:
    picture = fresh()
    settled(first, first.add(request(picture)))
    second.add(waiting := request(picture))
    until(lambda: second.step() is not None and shared.store("claims_waiting"), "the other to wait")
    second.finish(waiting)
    assert second.held == NOTHING_HELD
    # What is granted to who waits no more is given back.
    first.finish(*list(first.requests.values()))
    shared.until(lambda s: s["store"]["claims_held"] == s["store"]["claims_waiting"] == 0, "no claim to be left")


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


def test_with_no_time_to_wait_for_others_what_is_there_is_found(shared: Daemon, first: Steps) -> None:
    picture = fresh()
    encode(first, picture)
    with Steps(other_name(shared.socket, 1), wait_s_max=0) as another:
        asked = request(picture)
        assert right([asked], another.run(asked))
        assert another.encoded == []


def test_nobody_waits_for_what_the_engine_itself_is_storing(first: Steps) -> None:
    picture = fresh()
    one, another = request(picture), request(picture)
    settled(first, first.add(one))
    # It is looked up before the first is scheduled, and found to be missing while that stores what it encoded.
    first.add(another)
    stored = threading.Event()
    worker = first.workers[0]._worker
    assert worker is not None and worker._background.post(lambda _: _wait_for(stored))
    try:
        assert one.request_id in first.step()
        first.step()
        assert another.num_computed_tokens, "it is put off, though the engine has the picture"
    finally:
        stored.set()


def _wait_for(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S)


def test_an_input_that_was_settled_stays_so_when_its_request_grows(shared: Daemon, first: Steps) -> None:
    picture = fresh()
    settled(first, first.add(request(picture)))
    with Steps(other_name(shared.socket, 1), "ec_producer") as producer:
        # It encodes what another engine is encoding too, and does not store it.
        settled(producer, asked := producer.add(request(picture)))
        asked.mm_features.append(feature(item(fresh()), "more", 2 + ROWS))
        settled(producer, asked)
        producer.finish(asked)
        nothing_left(producer)


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


def encode_when_told(stage: Stage, socket: Path, picture: int) -> list[str]:
    claims.ANSWER_S = background.LATE_S = PATIENCE_S  # type: ignore[misc]
    with Steps(socket) as engine:
        mapped(engine)
        stage.tell("ready")
        stage.hear()
        asked = request(picture)
        assert right([asked], engine.run(asked))
        nothing_left(engine)
        return engine.encoded


def test_engines_in_two_processes_asked_at_once_encode_once(shared: Daemon, first: Steps) -> None:
    picture = fresh()
    before = len(first.encoded)
    with Child(encode_when_told, shared.socket, picture) as child:
        # It imports vLLM first, which takes minutes on a busy machine.
        assert child.hear(10 * PATIENCE_S) == "ready"
        child.tell("go")
        asked = request(picture)
        assert right([asked], first.run(asked))
        assert len(first.encoded) - before + len(child.hear()) == 1


# ---- what is held, and until when


def test_an_entry_evicted_between_scheduler_and_worker_is_loaded_all_the_same(
    shared: Daemon, first: Steps, second: Steps
) -> None:
    picture = fresh()
    there = keys(shared)
    encode(first, picture)
    (key,) = keys(shared) - there
    asked = second.add(request(picture))
    settled(second, asked)

    def evict() -> None:
        with tensord.Client(shared.socket) as client:
            assert client.evict(key) == 1
            for number in range(40):
                assert client.put(bytes([number]) * 32, np.full(MIB, 7, np.uint8), wait=True).state == "stored"

    before = list(second.encoded)
    results = second.step(between=evict)
    assert right([asked], [results[asked.request_id]])
    assert second.encoded == before


def test_a_handle_goes_to_workers_that_map_the_ring_and_bytes_to_those_that_do_not(first: Steps, second: Steps) -> None:
    picture, another = fresh(), fresh()
    encode(first, picture, another)
    side = second.connector._scheduler
    assert side is not None
    for number, known in ((picture, side._plan.rings), (another, {})):
        asked = second.add(request(number))
        settled(second, asked)
        side._plan.rings, mapped = dict(known), side._plan.rings
        made = second.schedule()
        side._plan.rings = mapped
        (load,) = made.ec_connector_metadata.loads.values()
        assert (load.handle is None) == (known == {}) == (load.payload is not None)
        results, reported = second.execute(made)
        second.update(made, reported)
        assert right([asked], [results[asked.request_id]])


def test_leases_are_held_until_all_ranks_are_done(shared: Daemon) -> None:
    picture = fresh()
    with Steps(shared.socket, ranks=2) as one, Steps(other_name(shared.socket, 1), ranks=2) as another:
        encode(one, picture)
        mapped(another)
        asked = another.add(request(picture))
        settled(another, asked)
        made = another.schedule()
        (load,) = made.ec_connector_metadata.loads.values()
        assert load.handle is not None
        another.finish(asked)
        another.requests[asked.request_id] = asked
        another.execute(made)
        for rank, left in ((0, 1), (1, 0)):
            said = Report(loaded={rank: made.ec_connector_metadata.step})
            another.connector.update_connector_output(ECConnectorOutput(ec_connector_worker_meta=said))
            assert another.held["steps"] == left
            assert shared.status()["pins"] == left
        del another.requests[asked.request_id]


def test_all_ranks_load_and_one_of_them_stores(shared: Daemon) -> None:
    picture, new = fresh(), fresh()
    with Steps(shared.socket, ranks=2) as one, Steps(other_name(shared.socket, 1), ranks=2) as another:
        encode(one, picture)
        asked = request(picture, new)
        assert right([asked], another.run(asked))
        for cached in another.caches:
            assert torch.equal(cached[f"picture-{picture}"], encoded(item(picture)))
        nothing_left(another)
        assert another.counts["loads"] == 2
        assert another.counts["saves"] == 1


def test_a_save_is_counted_by_the_time_it_is_reported_to_be_over(
    shared: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report is made by the step's thread at any moment: here, right before and after each word of the other's."""
    reports: list[Report | None] = []
    with Steps(shared.socket) as engine:
        side = engine.workers[0]._worker
        assert side is not None
        tell, take = side._tell, side._counts.take

        def reported(**news: Any) -> None:
            reports.append(side.report())
            tell(**news)
            reports.append(side.report())

        with monkeypatch.context() as patched:
            patched.setattr(side, "_tell", reported)
            engine.run(request(fresh()))
            until(lambda: any(said and said.settled for said in reports), "the save to be over")

        def taken() -> Any:
            counts = take()
            side._counts.add("saves")
            tell(settled=b"another")
            return counts

        with monkeypatch.context() as patched:
            patched.setattr(side, "_counts", SimpleNamespace(add=side._counts.add, take=taken))
            reports.append(side.report())
    saves = settled = 0
    for said in reports:
        if said is not None:
            saves, settled = saves + said.counts["saves"], settled + len(said.settled)
            assert saves >= settled
    assert settled


def test_a_step_whose_only_request_was_preempted_takes_no_lease_from_the_step_before(
    first: Steps, second: Steps
) -> None:
    pictures = fresh(), fresh()
    encode(first, *pictures)
    for number in pictures:
        settled(second, asked := request(number))
        assert second.connector.has_cache_item(f"picture-{number}")
        second.connector.update_state_after_alloc(asked, 0)
        second.connector.request_finished(asked)
        made = SchedulerOutput.make_empty()
        made.total_num_scheduled_tokens = 1 if number == pictures[0] else 0
        second.connector.build_connector_meta(made)
    assert second.held["steps"] == 2
    said = Report(loaded={0: 10**6})
    second.connector.update_connector_output(ECConnectorOutput(ec_connector_worker_meta=said))
    second.connector.build_connector_meta(_freed(*(f"picture-{number}" for number in pictures)))


def _freed(*names: str) -> SchedulerOutput:
    made = SchedulerOutput.make_empty()
    made.free_encoder_mm_hashes = list(names)
    return made


def test_a_preempted_request_never_stores_another_request_s_picture(first: Steps) -> None:
    name = f"clients-{fresh()}"
    settled(first, one := request(feature(item(fresh()), name)))
    another = request(feature(None, name))
    assert first.connector.ensure_cache_available(another, 0)
    for asked in (one, another):
        first.connector.update_state_after_alloc(asked, 0)
        first.connector.request_finished(asked)
    assert first.connector.build_connector_meta(SchedulerOutput.make_empty()) is NOTHING
    first.connector.build_connector_meta(_freed(name))


def test_a_rank_that_never_answers_keeps_a_lease_for_some_steps_only(
    shared: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensord.client.vllm.step_plan.LAG_STEPS_MAX", 3)
    picture = fresh()
    with Steps(shared.socket, ranks=2) as one, Steps(other_name(shared.socket, 1), ranks=2) as another:
        encode(one, picture)
        asked = another.add(request(picture))
        settled(another, asked)
        another.update(another.schedule(), None)
        for _ in range(3):
            assert another.held["steps"] == 1
            another.update(another.schedule(), None)
        another.update(another.schedule(), None)
        assert another.held["steps"] == 0


def test_an_allocation_that_never_comes_keeps_the_lease_until_the_request_ends(
    shared: Daemon, first: Steps, second: Steps
) -> None:
    picture = fresh()
    encode(first, picture)
    second.has_blocks = False
    asked = second.add(request(picture))
    until(lambda: second.step() is not None and second.held["leases"], "the lease")
    for _ in range(5):
        assert second.step() == {}
    assert shared.status()["pins"] == 1
    second.finish(asked)
    shared.until(lambda status: not status["pins"], "the lease to be given back")


def test_a_preempted_request_gets_its_pictures_again(first: Steps, second: Steps) -> None:
    picture = fresh()
    encode(first, picture)
    before = list(second.encoded)
    asked = second.add(request(picture))
    until(lambda: asked.request_id in second.step(), "its first step")
    second.manager.free(asked)
    # Others need the room meanwhile.
    filler = request(feature(item(fresh(), 1024), f"filler-{fresh()}", rows=1024))
    filler_tokens = filler.prompt_token_ids
    assert filler_tokens is not None
    assert right([filler], second.run(filler))
    asked.num_computed_tokens = 0
    assert right([asked], answers([second], asked))
    assert [name for name in second.encoded if name not in before] == [filler.mm_features[0].identifier]


def test_decoding_holds_nothing_and_says_nothing(first: Steps, second: Steps) -> None:
    picture = fresh()
    encode(first, picture)
    asked = second.add(request(picture))
    until(lambda: asked.request_id in second.step(), "its first step")
    for _ in range(3):
        assert second.schedule().ec_connector_metadata is NOTHING
    second.step()
    assert second.held == {**NOTHING_HELD, "requests": 1}


# ---- the daemon goes away


def test_the_daemon_killed_between_steps_means_misses_until_it_is_back() -> None:
    with Daemon() as daemon, ExitStack() as engines:
        daemon.start()
        one = engines.enter_context(Steps(daemon.socket))
        another = engines.enter_context(Steps(other_name(daemon.socket, 1)))
        picture, new = fresh(), fresh()
        encode(one, picture)
        asked = another.add(request(picture))
        settled(another, asked)
        # The scheduler has said hit.
        results = another.step(between=daemon.kill)
        assert right([asked], [results[asked.request_id]])
        assert another.encoded == []
        asked = request(new)
        assert right([asked], one.run(asked))
        assert one.encoded[-1] == f"picture-{new}"
        daemon.start()
        until(lambda: all(_connected(engine) for engine in (one, another)), "both to be attached")
        asked = request(picture)
        assert right([asked], another.run(asked))
        third = fresh()
        encode(one, third)
        before = list(another.encoded)
        asked = request(third)
        assert right([asked], another.run(asked))
        assert another.encoded == before


def test_a_ring_that_was_replaced_is_unmapped_and_what_a_request_holds_of_it_is_loaded() -> None:
    with Daemon() as daemon, ExitStack() as engines:
        daemon.start()
        one = engines.enter_context(Steps(daemon.socket, ranks=2))
        another = engines.enter_context(Steps(other_name(daemon.socket, 1), ranks=2))
        for _ in range(3):
            for engine in (one, another):
                _is_told(engine)
            picture = fresh()
            encode(one, picture)
            asked = another.add(request(picture))
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
            encode(engine, fresh())
        until(lambda: _rings_mapped(daemon) == 1, "only the new ring to be mapped")


def _is_told(engine: Steps) -> None:
    """Returns when the scheduler knows that all workers map the ring of now, and no other."""
    side = engine.connector._scheduler
    assert side is not None

    def told() -> bool:
        engine.step()
        client, _ = CLIENTS._clients.get(side._background._socket, (None, 0))
        ring = client.ring() if client is not None and client.connected else None
        return ring is not None and side._plan.rings == dict.fromkeys(range(len(engine.workers)), ring.identity)

    until(told, "workers to map the ring of now")


def _rings_mapped(daemon: Daemon) -> int:
    """How many rings of a daemon's this process maps."""
    rings = [
        line.split() for line in Path("/proc/self/maps").read_text().splitlines() if f"{daemon.instance}.ring" in line
    ]
    return len({fields[4] for fields in rings})


def _connected(engine: Steps) -> bool:
    assert engine.connector._scheduler is not None
    socket = engine.connector._scheduler._background._socket
    return CLIENTS._clients[socket][0].connected


def test_an_engine_starts_without_a_daemon_and_uses_it_once_it_is_there() -> None:
    with Daemon() as daemon, Steps(daemon.socket) as one:
        picture, new = fresh(), fresh()
        asked = request(picture)
        assert right([asked], one.run(asked))
        nothing_left(one)
        daemon.start()
        until(lambda: _connected(one), "it to be attached")
        encode(one, new)
        assert daemon.store("entries") == 1


def test_a_stopped_daemon_keeps_no_step_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensord.client.vllm.background.LATE_S", 0.25)
    monkeypatch.setattr("tensord.client.vllm.claims.ANSWER_S", 0.02)
    with Daemon() as daemon, ExitStack() as engines:
        daemon.start()
        one = engines.enter_context(Steps(daemon.socket))
        mapped(one)
        daemon.pause()
        try:
            side = one.connector._scheduler
            assert side is not None
            one.add(request(fresh()))
            until(lambda: one.step() is not None and side._claims._watched, "a claim that nobody answers")
            (unanswered,) = side._claims._watched
            for _ in range(4):
                asked = request(fresh())
                assert right([asked], one.run(asked))
            # All of that while the daemon had not said a word: no call can have waited for one.
            assert unanswered.claim is not None and unanswered.claim._answer in _open_answers(one)
            assert len(one.encoded) == 5
        finally:
            daemon.resume()
        one.finish(*list(one.requests.values()))
        nothing_left(one)
        encode(one, fresh())


def _open_answers(engine: Steps) -> list[Any]:
    from tensord.client.vllm.background import CLIENTS

    assert engine.connector._scheduler is not None
    client = CLIENTS._clients[engine.connector._scheduler._background._socket][0]
    return list(client.link.answers.pending.values())


def test_a_full_ring_refuses_and_ends_the_claim() -> None:
    with Daemon(ring_bytes=2 * MIB) as daemon, ExitStack() as engines:
        daemon.start()
        client = daemon.client()
        one = engines.enter_context(Steps(daemon.socket, capacity=1 << 20))
        mapped(one)
        assert client.put(b"k" * 32, np.zeros(int(1.9 * MIB), np.uint8), wait=True).state == "stored"
        pinned = client.get(b"k" * 32)
        assert pinned is not None
        rows = 2048
        asked = request(feature(item(fresh(), rows), f"large-{fresh()}", rows=rows))
        assert right([asked], one.run(asked))
        until(lambda: one.step() is not None and one.counts.get("refused"), "the refusal")
        nothing_left(one)
        daemon.until(lambda status: not status["store"]["claims_held"], "the claim to be over")


def test_a_waiting_engine_learns_at_once_that_nothing_is_stored_though_the_other_makes_no_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tensord.client.vllm.claims.SAVE_S", 10 * PATIENCE_S)
    rows = 2048
    with Daemon(ring_bytes=2 * MIB) as daemon, ExitStack() as engines:
        client = daemon.start().client()
        one = engines.enter_context(Steps(daemon.socket, capacity=1 << 20))
        another = engines.enter_context(Steps(other_name(daemon.socket, 1), capacity=1 << 20))
        mapped(one)
        assert client.put(b"k" * 32, np.zeros(int(1.9 * MIB), np.uint8), wait=True).state == "stored"
        pinned = client.get(b"k" * 32)
        assert pinned is not None
        large = feature(item(fresh(), rows), "large", rows=rows)
        settled(one, one.add(request(large)))
        another.add(waiting := request(large))
        until(lambda: another.step() is not None and daemon.store("claims_waiting"), "the other to wait")
        until(one.step, "the picture to be encoded")
        until(lambda: waiting.request_id in another.step(), "the other not to wait any longer")
        assert another.encoded == ["large"]
        assert not counted(another, "wait_timeouts")


# ---- weights that change


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
        mapped(third)
        asked = request(picture)
        assert right([asked], third.run(asked))
        assert third.encoded == []


def test_until_the_daemon_has_confirmed_new_weights_nothing_is_shared() -> None:
    with Daemon() as daemon, Steps(daemon.socket) as one:
        daemon.start()
        until(lambda: _connected(one), "it to be attached")
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
        until(lambda: _connected(one), "it to be attached")
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


def test_an_engine_with_pipeline_parallelism_shares_nothing(shared: Daemon, first: Steps) -> None:
    def staged(config: Any) -> None:
        config.parallel_config.pipeline_parallel_size = 2

    picture = fresh()
    encode(first, picture)
    with Steps(shared.socket, change=staged) as one:
        asked = request(picture)
        assert right([asked], one.run(asked))
        assert one.encoded == [f"picture-{picture}"]


# ---- roles


def test_a_producer_stores_and_never_says_hit(shared: Daemon) -> None:
    picture = fresh()
    with (
        Steps(shared.socket, "ec_producer") as producer,
        Steps(other_name(shared.socket, 1), "ec_consumer") as consumer,
    ):
        producer.run(request(picture))
        nothing_left(producer)
        asked = request(picture)
        assert right([asked], consumer.run(asked))
        assert consumer.encoded == []
        # Under another name it is encoded again, for who asks; but not stored again.
        producer.run(request(feature(item(picture), "another name")))
        assert producer.encoded == [f"picture-{picture}", "another name"]
        assert counted(producer, "saves") == 1


def test_a_consumer_stores_nothing_keeps_no_claim_and_waits_for_a_producer(shared: Daemon) -> None:
    picture, new = fresh(), fresh()
    with (
        Steps(shared.socket, "ec_producer") as producer,
        Steps(other_name(shared.socket, 1), "ec_consumer") as consumer,
    ):
        there = keys(shared)
        consumer.has_blocks = False
        asked = consumer.add(request(new))
        settled(consumer, asked)
        shared.until(lambda status: not status["store"]["claims_held"], "what it was granted to be given back")
        consumer.has_blocks = True
        made = consumer.schedule()
        assert made.ec_connector_metadata is NOTHING
        results, reported = consumer.execute(made)
        consumer.update(made, reported)
        assert right([asked], [results[asked.request_id]])
        consumer.finish(asked)
        nothing_left(consumer)
        assert keys(shared) == there
        settled(producer, producer.add(request(picture)))
        asked = consumer.add(request(picture))
        until(lambda: consumer.step() is not None and shared.store("claims_waiting"), "the consumer to wait")
        until(producer.step, "the picture to be encoded")
        assert right([asked], answers([consumer], asked))
        assert consumer.encoded == [f"picture-{new}"]


# ---- loads that fail


def test_a_load_that_fails_ends_its_request_and_those_that_ask_for_that_picture_later(
    apart: tuple[Steps, Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = apart
    picture = fresh()
    encode(first, picture)
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
    second.manager.reset()
    asked = request(picture)
    assert right([asked], second.run(asked))
    assert counted(second, "load_failures") == 1


# ---- whatever happens, in whatever order


@st.composite
def _acts(draw: st.DrawFn) -> list[tuple[str, int]]:
    kinds = st.sampled_from(["add", "add", "step", "step", "other", "abort", "preempt", "starve", "feed", "reset"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 3)), min_size=1, max_size=25))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=_acts())
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
            engine.manager.reset()
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


# ---- settings, metrics, the end


def test_an_unknown_setting_of_ours_is_named_at_the_start_and_others_are_left_alone(shared: Daemon) -> None:
    with pytest.raises(BadConfiguration, match=r"tensord\.wait_ms"):
        Steps(shared.socket, wait_ms=3)
    with pytest.raises(BadConfiguration, match=r"tensord\.wait_s_max='long'"):
        Steps(shared.socket, wait_s_max="long")

    for name in (
        *("socket", "tensord_socket", "Tensord.Wait-S-Max", " tensord.socket", "tensord.socket ", "tensord/socket"),
        *("tensrod.socket", "tensord.sockets", "tensor.socket"),
    ):
        with pytest.raises(BadConfiguration, match=r"write tensord\.(socket|wait_s_max)$"):
            Settings.read({name: "1"})
    with pytest.raises(BadConfiguration, match=r"'tensord' in .* is unknown; there are tensord\.socket, "):
        Settings.read({"tensord": {"socket": "1"}})
    for name, value in (("socket", ""), ("revision", "\ud800"), ("tenant", "a\0b")):
        with pytest.raises(BadConfiguration, match=rf"tensord\.{name}='") as refused:
            Settings.read({f"tensord.{name}": value})
        str(refused.value).encode()

    def others(config: Any) -> None:
        config.ec_transfer_config.ec_connector_extra_config.update(shared_storage_path="/tmp", socket_timeout=3)

    with Steps(shared.socket, change=others):
        pass


@pytest.mark.parametrize("difference", ["revision", "tenant"])
def test_engines_of_another_revision_or_tenant_share_nothing(shared: Daemon, difference: str) -> None:
    picture = fresh()
    given: Any = {difference: "another"}
    with Steps(shared.socket) as one, Steps(other_name(shared.socket, 1), **given) as another:
        encode(one, picture)
        asked = request(picture)
        assert right([asked], another.run(asked))
        assert another.encoded == [f"picture-{picture}"]


def test_models_with_an_encoder_and_a_decoder_are_left_alone(shared: Daemon) -> None:
    config = SimpleNamespace(
        ec_transfer_config=SimpleNamespace(is_ec_producer=True, is_ec_consumer=True, ec_connector_extra_config={}),
        model_config=SimpleNamespace(is_encoder_decoder=True),
    )
    for role in ECConnectorRole:
        connector = TensordECConnector(config, role)
        assert connector.ensure_cache_available(request(1), 0)
        assert not connector.has_cache_item("picture-1")
        connector.save_caches({}, "picture-1")
        connector.shutdown()


def test_every_count_has_a_metric_of_its_name() -> None:
    unregister_vllm_metrics()
    registry = CollectorRegistry()
    kinds = {kind: _in(registry, kind) for kind in (Counter, Gauge, Histogram)}
    metrics = TensordECConnector.build_prom_metrics(vllm_config(), kinds, ["engine"], {0: ["0"], 1: ["1"]})
    metrics.observe(dict.fromkeys(COUNTERS, 2), 1)
    for name in COUNTERS:
        assert registry.get_sample_value(f"vllm:ec_tensord_{name}_total", {"engine": "1"}) == 2
        assert registry.get_sample_value(f"vllm:ec_tensord_{name}_total", {"engine": "0"}) == 0


def _in(registry: CollectorRegistry, kind: Any) -> Any:
    return lambda **arguments: kind(registry=registry, **arguments)


def test_counts_of_two_processes_are_added() -> None:
    one = TensordECConnector.build_ec_connector_stats({"hits": 2})
    assert one.aggregate(TensordECStats({"hits": 1, "misses": 4})).reduce() == {"hits": 3, "misses": 4}
    assert TensordECConnector.build_ec_connector_stats().is_empty()


def test_shutting_down_twice_leaves_no_thread_and_no_client(shared: Daemon) -> None:
    before, rows = set(threading.enumerate()), len(shared.client_rows())
    engine = Steps(other_name(shared.socket, 2))
    encode(engine, fresh())
    assert len(shared.client_rows()) > rows
    for _ in range(2):
        engine.close()
        until(lambda: not set(threading.enumerate()) - before, "the threads to be gone")
    until(lambda: len(shared.client_rows()) <= rows, "the client to be gone")


def test_reports_of_ranks_are_one_report_in_any_order() -> None:
    reports = [
        Report(loaded={0: 3}, rings={0: b"a"}, settled=[b"k"], encoded_rows=4, encode_s=1.0),
        Report(loaded={1: 3}, rings={1: b"a"}, failed={"x"}),
        Report(loaded={1: 2}),
    ]
    for one, another in pairwise([*reports, reports[0]]):
        assert one.aggregate(another) == another.aggregate(one)
    total = reports[0].aggregate(reports[1]).aggregate(reports[2])
    assert total.loaded == {0: 3, 1: 3}
    assert total.rings == {0: b"a", 1: b"a"}
    assert reports[0].rings == {0: b"a"}, "a report is not changed by being added"


class AtOnce(background.Background):
    """Does each job before its queuer goes on, as a thread may that is given the interpreter in that moment."""

    def __init__(self, client: tensord.Client) -> None:
        self.client = client

    def post(self, job: background.Job) -> bool:
        job(self.client)
        return True

    def post_end(self, job: background.Job) -> None:
        job(self.client)

    late = False


def test_a_claim_is_asked_for_however_soon_the_thread_gets_to_it(shared: Daemon) -> None:
    namespace = tensord.Namespace(model="m", revision="1", dtype="x", processor="none")
    asked = claims.EncodeClaims(AtOnce(shared.client()), computes=True)
    wanted = asked.want(namespace.key("encoder", "image", b"1"), ROWS, "a request", 0.0)
    assert wanted is not None and wanted.claim is not None
    asked.leave(wanted, "a request")


# ---- how long another engine is waited for


def learned(engine: Steps, row_s: float | None) -> SchedulerSide:
    """The engine takes so many seconds for each row of an encoder output, as far as it knows."""
    side = engine.connector._scheduler
    assert side is not None
    side._pace.row_s = row_s
    return side


def _waiting(side: SchedulerSide) -> int:
    return sum(wanted.state == "waiting" for wanted in side._claims._wanted.values())


@pytest.fixture
def hurried(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensord.client.vllm.pace.WAIT_S_LEAST", 0.02)


@pytest.mark.usefixtures("hurried")
def test_another_engine_is_waited_for_by_what_it_expected_to_take_for_its_whole_step(
    apart: tuple[Steps, Steps],
) -> None:
    first, second = apart
    encode(first, fresh())
    side = first.connector._scheduler
    assert side is not None and side._pace.row_s is not None and side._pace.row_s > 0, "learned from what storing took"
    pictures = [fresh() for _ in range(4)]
    learned(first, 0.5 / ROWS)
    side = learned(second, 0.5 / ROWS)
    for picture in pictures:
        settled(first, first.add(request(picture)))
    until(lambda: first.held["claims"] == 4, "four claims")
    for picture in pictures:
        second.add(request(picture))
    until(lambda: second.step() is not None and _waiting(side) == 4, "four that wait")
    now = time.monotonic()
    expected_s = [wanted.expected_at - now for wanted in side._claims._wanted.values()]
    # The last is behind three others in the first engine's step, and each was announced so.
    assert max(expected_s) > 1 > min(expected_s)
    waits = max(side._claims._wanted.values(), key=lambda wanted: wanted.expected_at)
    assert side._pace.patience_s(waits.expected_at, now) == pytest.approx(3 * max(expected_s), rel=0.01)
    waits.expected_at = now + 1e6
    assert side._pace.patience_s(waits.expected_at, now) == side._wait_s_max
    waits.expected_at = now - 1
    assert side._pace.patience_s(waits.expected_at, now) == 0.02
    waits.expected_at = 0.0
    # It did not tell, and may be doing all that this one waits for.
    assert side._pace.patience_s(waits.expected_at, now) >= 3 * 4 * 0.5
    learned(second, None)
    assert side._pace.patience_s(waits.expected_at, now) == side._wait_s_max


def test_all_that_one_step_encodes_is_announced_for_the_steps_end(apart: tuple[Steps, Steps]) -> None:
    first, second = apart
    pictures = [fresh() for _ in range(4)]
    learned(first, 10.0 / ROWS)
    side = learned(second, 10.0 / ROWS)
    first.has_blocks = False
    for engine in apart:
        for picture in pictures:
            engine.add(request(picture))
        if engine is first:
            until(lambda: first.step() is not None and first.held["claims"] == 4, "four claims")
    until(lambda: second.step() is not None and _waiting(side) == 4, "four that wait")
    now = time.monotonic()
    # The first of them alone would take 10 s.
    assert min(wanted.expected_at - now for wanted in side._claims._wanted.values()) > 20


@pytest.fixture
def comparing(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As outside of tests, engines do not wait for one that they take for slower."""
    monkeypatch.setattr("tensord.client.vllm.pace.SOONER", SOONER)


@pytest.mark.usefixtures("comparing")
def test_an_engine_that_would_encode_faster_than_the_other_does_not_wait(apart: tuple[Steps, Steps]) -> None:
    first, second = apart
    picture = fresh()
    learned(first, 10.0 / ROWS)
    settled(first, first.add(request(picture)))
    learned(second, 1.0 / ROWS)
    second.add(asked := request(picture))
    until(lambda: asked.request_id in second.step(), "the request to be scheduled while the other has the claim")
    assert first.held["claims"] == 1
    assert counted(second, "overtaken") == 1 and not counted(second, "waits")


@pytest.mark.usefixtures("comparing")
def test_an_engine_that_would_take_as_long_as_the_other_waits(apart: tuple[Steps, Steps]) -> None:
    first, second = apart
    pictures = [fresh() for _ in range(3)]
    learned(first, 10.0 / ROWS)
    learned(second, 10.0 / ROWS)
    for picture in pictures:
        settled(first, first.add(request(picture)))
        second.add(request(picture))
    until(lambda: second.step() is not None and counted(second, "waits") == 3, "three that wait")
    assert not counted(second, "overtaken")


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
