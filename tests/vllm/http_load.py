"""Requests with pictures to vLLM's HTTP server, while its daemon and its processes are disturbed.

Owns: what is asked, what is done meanwhile, and the judgement of each answer. As a program it is the long form of
test_http_load.py:

    python -m tests.vllm.http_load --requests 15000

Each answer is compared with what the same server said to the same picture before there was a daemon.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import tensord

from ..command_line import end_cleanly, whole
from ..daemon_process import PATIENCE_S, Daemon
from .api_servers import ApiServers, Reply

PICTURES: Final = 24
CLIENTS: Final = 6
TOKENS: Final = 3
CLOSE_TO: Final = 1e-3
"""Steps of several requests add in another order than steps of one."""
CONNECTOR: Final = (
    "--ec-transfer-config",
    '{"ec_connector": "TensordECConnector", "ec_role": "ec_both"}',
    "--ec-manager-config",
    '{"encoder_cache_manager_cls": "tensord.client.vllm.TensordEncoderCacheManager"}',
)


@dataclass
class Found:
    """What came of a run: `wrong` and `errors` have a line each, `done` counts what was done to the processes."""

    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)


def environ(daemon: Daemon) -> dict[str, str]:
    """What a server under load is started with."""
    return {"TENSORD_VLLM_PROCESSOR_CACHE": "1", "TENSORD_SOCKET": str(daemon.socket)}


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


def run(daemon: Daemon, servers: ApiServers, requests: int, seed: int, pause_s: float) -> Found:
    """Asks from several clients at once, and disturbs as it goes, with pauses of up to `pause_s`. Ends when at least
    `requests` were asked and each disturbance was made. The daemon is not running yet; afterwards it runs.
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
                if number >= requests and len(found.done) == len(acts):
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
            time.sleep(chance.uniform(0, pause_s))
    finally:
        over.set()
        for client in clients:
            client.join()
    return found


def _same(said: Reply, right: Reply) -> bool:
    return said.text == right.text and all(
        abs(one - other) < CLOSE_TO for one, other in zip(said.logprobs, right.logprobs, strict=True)
    )


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=whole(1), default=15_000)
    parser.add_argument("--seed", type=whole(0), default=0)
    parser.add_argument("--pause-s", type=float, default=4.0)
    parser.add_argument("--api-servers", type=whole(1), default=2)
    parser.add_argument("--connector", action="store_true", help="share encoder outputs as well")
    given = parser.parse_args()
    from .tiny_llava import write_tiny_llava

    with tempfile.TemporaryDirectory(prefix="tensord-load-") as folder, contextlib.ExitStack() as started:
        daemon = started.enter_context(Daemon())
        model = write_tiny_llava(Path(folder) / "model")
        flags = CONNECTOR if given.connector else ()
        servers = ApiServers(model, Path(folder) / "log", given.api_servers, environ(daemon), flags)
        started.enter_context(servers).wait_up()
        began_s = time.monotonic()
        found = run(daemon, servers, given.requests, given.seed, given.pause_s)
        took_s = time.monotonic() - began_s
        print(f"{found.answers} answers in {took_s:.0f} s, {len(found.wrong)} wrong, {len(found.errors)} errors")
        print(", ".join(f"{name} {times}" for name, times in sorted(found.done.items())))
        hits, asked = (servers.metric(f"vllm:mm_cache_{name}_total") for name in ("hits", "queries"))
        print(f"processor cache: {hits:.0f} hits of {asked:.0f}")
        for line in (found.wrong + found.errors)[:20]:
            print(line)
        if found.wrong or found.errors:
            print(servers.tail())
            raise SystemExit(1)


if __name__ == "__main__":
    end_cleanly()
    main()
