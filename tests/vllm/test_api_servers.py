"""API processes in front of one engine share what their processors made; in vLLM's own cache each has its own then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..daemon_process import Daemon
from .api_servers import ApiServers

FRONTENDS = 2
REQUESTS_MAX = 100


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        yield running.start()


@pytest.fixture(scope="module")
def servers(daemon: Daemon, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServers]:
    log = tmp_path_factory.mktemp("servers") / "log"
    ours = {"TENSORD_VLLM_PROCESSOR_CACHE": "1", "TENSORD_SOCKET": str(daemon.socket)}
    with ApiServers(model, log, FRONTENDS, ours) as started:
        yield started.wait_up()


def test_an_item_of_one_api_process_is_not_processed_by_another(servers: ApiServers, daemon: Daemon) -> None:
    replies = [servers.ask(1)]
    while len(_frontends_that_looked(daemon)) < FRONTENDS:
        replies.append(servers.ask(1))
        assert len(replies) < REQUESTS_MAX, f"of {FRONTENDS} API processes some were never asked"
    assert set(replies) == {replies[0]}
    asked, hits = (servers.metric(f"vllm:mm_cache_{name}_total") for name in ("queries", "hits"))
    assert asked == len(replies)
    assert hits == asked - 1, "only the first of all requests was processed"
    assert sum(row["misses"] for row in _frontends_that_looked(daemon)) == 1


def test_api_processes_answer_without_a_daemon(servers: ApiServers, daemon: Daemon) -> None:
    right = servers.ask(2)
    daemon.kill()
    assert [servers.ask(2) for _ in range(4)] == [right] * 4
    other = servers.ask(3)
    daemon.start()
    assert [servers.ask(3) for _ in range(4)] == [other] * 4


def _frontends_that_looked(daemon: Daemon) -> list[dict[str, int]]:
    return [row for row in daemon.client_rows() if row["name"].endswith(" frontend") and row["hits"] + row["misses"]]
