"""What the workers report, each for itself, reaches the manager as if one had reported it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_offload.base import ReqContext, make_offload_key

import tensord
from tensord.client.vllm.kv.jobs import WorkerReport, with_theirs
from tensord.client.vllm.kv.keys import Chunks
from tensord.client.vllm.kv.scheduler import KVManager

NAMESPACE = tensord.Namespace(model="m", revision="1", dtype="float32", processor="p")


def merged(one: WorkerReport, other: WorkerReport) -> WorkerReport:
    """Both reports in one, the same in either order."""
    both = one.aggregate(other)
    assert both == other.aggregate(one)
    return both


def test_a_merged_report_has_what_both_ranks_have_done_and_failed_and_found_damaged() -> None:
    one = WorkerReport({4: 1}, done=Counter([1, 2]), failed={1: {0, 2}, 2: {5}}, damaged={b"1", b"2"})
    other = WorkerReport({4: 1, 5: 1}, done=Counter([1, 3]), failed={1: {2, 3}, 3: {0}}, damaged={b"2"})
    both = merged(one, other)
    assert both.done == {1: 2, 2: 1, 3: 1}
    assert both.completed_jobs == {4: 2, 5: 1}
    assert both.failed == {1: {0, 2, 3}, 2: {5}, 3: {0}}
    assert both.damaged == {b"1", b"2"}
    assert one.failed == {1: {0, 2}, 2: {5}}, "a report is not changed by a merge"


@pytest.mark.parametrize("first", [0, 1])
def test_what_one_rank_reports_is_not_lost_where_the_other_has_only_finished_jobs_of_vllm(first: int) -> None:
    ranks = [
        with_theirs(None, OffloadingWorkerMetadata({4: 1})),
        with_theirs(WorkerReport(done=Counter([1]), damaged={b"1"}), None),
    ]
    one, other = ranks[first], ranks[1 - first]
    assert one is not None and other is not None
    # vLLM merges what the ranks send with the method of the first.
    both = one.aggregate(other)
    assert (both.done, both.damaged, both.completed_jobs) == ({1: 1}, {b"1"}, {4: 1})
    assert with_theirs(None, None) is None


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[KVManager]:
    """The manager of two ranks, without a daemon."""
    found = KVManager(
        str(tmp_path / "control.sock"),
        "scheduler",
        NAMESPACE,
        chunks=Chunks(2, {0: 32}, [0], 32),
        stores=True,
        finds=True,
    )
    yield found
    found.shutdown()


@pytest.mark.parametrize("given", [{"lora_request": object()}, {"prompt_embeds": object()}], ids=["LoRA", "embeddings"])
def test_a_request_that_has_more_than_tokens_and_media_shares_nothing(
    manager: KVManager, given: dict[str, Any]
) -> None:
    plain = {"lora_request": None, "prompt_embeds": None, "mm_features": (), "block_hashes": [bytes(32)]}
    assert manager._naming(SimpleNamespace(**plain)) is not None
    assert manager._naming(SimpleNamespace(**{**plain, **given})) is None


@pytest.mark.parametrize("together", [False, True], ids=["in two steps", "in one step"])
def test_a_load_is_done_only_when_both_ranks_have_reported_it(manager: KVManager, together: bool) -> None:
    tickets = [manager.prepare_load([make_offload_key(bytes(32), 0)], ReqContext(name)).ticket for name in "ab"]
    for ticket in tickets:
        one, other = WorkerReport(done=Counter([ticket])), WorkerReport(done=Counter([ticket]))
        loads = len(manager._loading)
        if not together:
            manager.take_in(one)
            assert len(manager._loading) == loads
        manager.take_in(merged(one, other) if together else other)
        assert len(manager._loading) == loads - 1
