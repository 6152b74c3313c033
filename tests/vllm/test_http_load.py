"""A server with several API processes in front of one engine answers every request under load, and rightly, whatever
becomes of the daemon and its ring.

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

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


def test_no_request_fails_or_is_answered_wrongly_while_daemon_and_ring_come_and_go(model: Path, tmp_path: Path) -> None:
    with Daemon() as daemon:
        environ = {"TENSORD_VLLM_PROCESSOR_CACHE": "1", "TENSORD_SOCKET": str(daemon.socket)}
        with ApiServers(model, tmp_path / "log", FRONTENDS, environ) as servers:
            servers.wait_up()
            right = [servers.ask(number, TOKENS) for number in range(PICTURES)]
            daemon.start()
            faults = run(daemon, servers, right)
            assert not faults, f"{faults}\n{servers.tail()}"

            # While they come and go, a picture may well never be asked for twice in one of the daemon's lives.
            before = servers.metric(HITS), daemon.store("hits")

            def shared_again() -> bool:
                servers.ask(0)
                return servers.metric(HITS) > before[0] and daemon.store("hits") > before[1]

            until(shared_again, "a hit in the shared processor cache once the daemon stays")


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


def run(daemon: Daemon, servers: ApiServers, right: Sequence[Reply]) -> list[str]:
    """Asks from several clients at once, and disturbs as it goes, until at least REQUESTS were asked and each
    disturbance was made. Gives a line for each request that failed or was answered wrongly."""
    faults: list[str] = []
    done: Counter[str] = Counter()
    numbers = itertools.count()
    acts = disturbances(daemon, servers)
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            number = next(numbers)
            if number >= REQUESTS and len(done) == len(acts):
                return
            picture = random.Random(number).randrange(PICTURES)
            try:
                said = servers.ask(picture, TOKENS)
            except Exception as error:
                faults.append(f"request {number}: {type(error).__name__}: {error}")
                continue
            if not _same(said, right[picture]):
                faults.append(f"request {number}, picture {picture}: {said} instead of {right[picture]}")

    clients = [threading.Thread(target=ask, name=f"client-{number}", daemon=True) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    chance = random.Random(1)
    order: list[str] = []
    try:
        while any(client.is_alive() for client in clients):
            order = order or chance.sample(sorted(acts), len(acts))
            name = order.pop()
            acts[name](chance)
            done[name] += 1
            time.sleep(chance.uniform(0, PAUSE_S))
    finally:
        over.set()
        for client in clients:
            client.join()
    print(f"{next(numbers)} requests; {done}")
    return faults


def _same(said: Reply, right: Reply) -> bool:
    return said.text == right.text and all(
        abs(one - other) < CLOSE_TO for one, other in zip(said.logprobs, right.logprobs, strict=True)
    )
