"""What an engine holds for its requests and its ranks, and until when."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ECConnectorOutput

import tensord
from tensord.client.vllm.encoder.step import NOTHING, Report
from tests.daemon_process import MIB, Daemon, until

from ..step_bench import Steps, answers, attached, encoded, feature, item, other_name, request, right
from .stand import NOTHING_HELD, encode, fresh, keys, nothing_left, settled

pytestmark = pytest.mark.usefixtures("patient")


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


def test_leases_are_held_until_all_ranks_are_done(shared: Daemon) -> None:
    picture = fresh()
    with Steps(shared.socket, ranks=2) as one, Steps(other_name(shared.socket, 1), ranks=2) as another:
        encode(one, picture)
        attached(another)
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
