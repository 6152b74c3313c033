"""A server with several API processes in front of one engine: they share what their processors made, where in vLLM's
own cache each has its own. Under load it answers every request, and rightly, whatever becomes of the daemon and its
ring.

Each answer is compared with what the same server said to the same picture before there was a daemon. The long form is
`make http-load`.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

import tensord

from ..daemon_process import PATIENCE_S, Daemon, until
from .api_servers import ApiServers, Reply

REQUESTS: Final = int(os.environ.get("HTTP_LOAD_REQUESTS", "250"))
PAUSE_S: Final = 0.2 if REQUESTS < 1000 else 4.0
FRONTENDS: Final = 2
PICTURES: Final = 24
CLIENTS: Final = 6
TOKENS: Final = 3
CLOSE_TO: Final = 1e-3
"""Steps of several requests add in another order than steps of one."""
HITS: Final = "vllm:mm_cache_hits_total"


@dataclass
class Found:
    """What came of a run: `wrong` and `errors` have a line each, `done` counts what was done to the processes."""

    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as made:
        yield made


@pytest.fixture(scope="module")
def servers(daemon: Daemon, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServers]:
    log = tmp_path_factory.mktemp("load") / "log"
    environ = {"TENSORD_VLLM_PROCESSOR_CACHE": "1", "TENSORD_SOCKET": str(daemon.socket)}
    with ApiServers(model, log, FRONTENDS, environ) as started:
        yield started.wait_up()


def test_no_request_fails_or_is_answered_wrongly_while_daemon_and_ring_come_and_go(
    servers: ApiServers, daemon: Daemon
) -> None:
    found = run(daemon, servers, seed=1)
    print(f"{found.answers} answers; {found.done}")
    assert not found.errors and not found.wrong, f"{found}\n{servers.tail()}"
    assert found.answers >= REQUESTS

    # While they come and go, a picture may well never be asked for twice in one of the daemon's lives.
    before = servers.metric(HITS), daemon.store("hits")

    def shared_again() -> bool:
        servers.ask(0)
        return servers.metric(HITS) > before[0] and daemon.store("hits") > before[1]

    assert until(shared_again, "a hit in the shared processor cache once the daemon stays")


def disturbances(daemon: Daemon, servers: ApiServers) -> dict[str, Callable[[random.Random], None]]:
    """What is done meanwhile, by name. After each the daemon and all processes run."""

    def killed(chance: random.Random) -> None:
        daemon.kill()
        time.sleep(chance.uniform(0, 0.5))
        daemon.start()

    def stopped(chance: random.Random) -> None:
        daemon.pause()
        time.sleep(chance.uniform(0, 1.0))
        daemon.resume()

    def cleared(chance: random.Random) -> None:
        with tensord.Client(daemon.socket) as client:
            assert client.wait_connected(PATIENCE_S)
            client.clear()

    def replaced(chance: random.Random) -> None:
        daemon.interrupt()
        time.sleep(chance.uniform(0, 0.5))
        daemon.start()

    def replaced_while_one_is_stopped(chance: random.Random) -> None:
        """A frontend or the engine sees neither the old daemon's end nor the new one's beginning."""
        pid = chance.choice(servers.children())
        os.kill(pid, signal.SIGSTOP)
        try:
            replaced(chance)
        finally:
            os.kill(pid, signal.SIGCONT)

    return {act.__name__: act for act in (killed, stopped, cleared, replaced, replaced_while_one_is_stopped)}


def run(daemon: Daemon, servers: ApiServers, seed: int) -> Found:
    """Asks from several clients at once, and disturbs as it goes. Ends when at least REQUESTS were asked and each
    disturbance was made. The daemon is not running yet; afterwards it runs.
    """
    found = Found()
    right = [servers.ask(number, TOKENS) for number in range(PICTURES)]
    daemon.start()
    numbers = itertools.count()
    acts = disturbances(daemon, servers)
    lock = threading.Lock()
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            with lock:
                number = next(numbers)
                if number >= REQUESTS and len(found.done) == len(acts):
                    return
            picture = random.Random(f"{seed} {number}").randrange(PICTURES)
            try:
                said = servers.ask(picture, TOKENS)
            except Exception as error:
                with lock:
                    found.errors.append(f"request {number}: {type(error).__name__}: {error}")
                continue
            with lock:
                found.answers += 1
                if not _same(said, right[picture]):
                    found.wrong.append(f"request {number}, picture {picture}: {said} instead of {right[picture]}")

    clients = [threading.Thread(target=ask, name=f"client-{number}", daemon=True) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    chance = random.Random(seed)
    order: list[str] = []
    try:
        while any(client.is_alive() for client in clients):
            order = order or chance.sample(sorted(acts), len(acts))
            name = order.pop()
            acts[name](chance)
            with lock:
                found.done[name] += 1
            time.sleep(chance.uniform(0, PAUSE_S))
    finally:
        over.set()
        for client in clients:
            client.join()
    return found


def _same(said: Reply, right: Reply) -> bool:
    return said.text == right.text and all(
        abs(one - other) < CLOSE_TO for one, other in zip(said.logprobs, right.logprobs, strict=True)
    )
