"""What an engine holds for its requests and its ranks, and until when."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ECConnectorOutput

from tensord.client.vllm.encoder.steps import NOTHING, Report
from tests.daemon_process import Daemon

from ..conftest import fresh
from ..step_bench import Steps, attached, encoded, feature, item, other_name, request
from .stand import encode, settled

pytestmark = pytest.mark.usefixtures("patient")


def test_all_ranks_load_and_leases_are_held_until_all_are_done(shared: Daemon) -> None:
    with Steps(shared.socket, ranks=2) as one, Steps(other_name(shared.socket, 1), ranks=2) as another:
        picture = encode(one)
        attached(another)
        asked = another.add(request(picture))
        settled(another, asked)
        made = another.schedule()
        (load,) = made.ec_connector_metadata.loads.values()
        assert load.handle is not None
        another.finish(asked)
        another.requests[asked.request_id] = asked
        another.execute(made)
        for cached in another.caches:
            assert torch.equal(cached[f"picture-{picture}"], encoded(item(picture)))
        for rank, left in ((0, 1), (1, 0)):
            said = Report(loaded={rank: made.ec_connector_metadata.step})
            another.connector.update_connector_output(ECConnectorOutput(ec_connector_worker_meta=said))
            assert another.held["steps"] == left
            assert shared.status()["pins"] == left
        del another.requests[asked.request_id]


def test_a_preempted_request_never_stores_another_request_s_picture(first: Steps) -> None:
    name = f"clients-{fresh()}"
    settled(first, one := request(feature(item(fresh()), name)))
    another = request(feature(None, name))
    assert first.connector.ensure_cache_available(another, 0)
    for asked in (one, another):
        first.connector.update_state_after_alloc(asked, 0)
        first.connector.request_finished(asked)
    assert first.connector.build_connector_meta(SchedulerOutput.make_empty()) is NOTHING
    freed = SchedulerOutput.make_empty()
    freed.free_encoder_mm_hashes = [name]
    first.connector.build_connector_meta(freed)
