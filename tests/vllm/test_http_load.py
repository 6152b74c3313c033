"""A server under load answers every request, and rightly, whatever becomes of the daemon and its ring.

The long form is `make http-load`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..daemon_process import Daemon
from . import http_load
from .api_servers import ApiServers

REQUESTS = 250
FRONTENDS = 2


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
    assert found.answers == REQUESTS
    assert len(found.done) == len(http_load.disturbances(daemon, servers)), "all of it was done"
    assert servers.metric("vllm:mm_cache_hits_total") > 0, "the cache was in use"
