"""A server under load answers every request, and rightly, whatever becomes of the daemon and its ring.

The long form is `make http-load`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..daemon_process import Daemon, until
from . import http_load
from .api_servers import ApiServers

REQUESTS = 250
FRONTENDS = 2
HITS = "vllm:mm_cache_hits_total"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as made:
        yield made


@pytest.fixture(scope="module")
def servers(daemon: Daemon, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServers]:
    log = tmp_path_factory.mktemp("load") / "log"
    with ApiServers(model, log, FRONTENDS, http_load.environ(daemon)) as started:
        yield started.wait_up()


def test_no_request_fails_or_is_answered_wrongly_while_daemon_and_ring_come_and_go(
    servers: ApiServers, daemon: Daemon
) -> None:
    found = http_load.run(daemon, servers, REQUESTS, seed=1, pause_s=0.2)
    assert not found.errors and not found.wrong, f"{found}\n{servers.tail()}"
    assert found.answers >= REQUESTS

    # While they come and go, a picture may well never be asked for twice in one of the daemon's lives.
    before = servers.metric(HITS), daemon.store("hits")

    def shared_again() -> bool:
        servers.ask(0)
        return servers.metric(HITS) > before[0] and daemon.store("hits") > before[1]

    assert until(shared_again, "a hit in the shared processor cache once the daemon stays")
