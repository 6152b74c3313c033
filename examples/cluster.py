"""Three hosts look at the same photographs, and answer questions with the same long system prompt: each photograph is
encoded once in the cluster, and the prompt is computed once.

    python examples/cluster.py [--photographs N]

Each host is a daemon with a ring and a network address of its own, and a process that goes through the photographs in
its own order with a real encoder. Behind the rings is one redis-server. As root, the hosts are namespaces of the
network around a bridge; otherwise they share the loopback. Then the hosts answer one after the other, with the tiny
decoder of `chat_prefix.py`. Before, each answers a greeting: only a process that has put keys and values knows the
form in which it looks for those of others.

The exit status is 1 if an embedding differs from a fresh encoding, an answer from one without a cache, or a host has
read nothing from the others. On a busy machine a host may stop waiting for another one, and encode a photograph again.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from chat_prefix import Engine, Turn
from conversation import AGENTS, QUESTIONS, Conversation, draw
from demonstration import OwnProcess, own_daemon
from figures import aligned
from hosts_network import hosts
from shared_vision import SIDE, TOKENS, key_of
from tiny_decoder import BEGIN, PICTURE, PICTURE_TOKENS, tokens_of
from vision import photographs
from vision.encoder import Encoder

import tensord

HOSTS: Final = 3
ENCODE_S_MAX: Final = 60.0
GREETING: Final = "Good morning. Which of the three are you, and what do you do first?"
OWN_PICTURE: Final = 7


@dataclass
class Looked:
    """What one host saw: the names of the photographs that it encoded itself, and the milliseconds of each lookup by
    where the embedding came from."""

    encoded: list[str] = field(default_factory=list)
    encode_ms: list[float] = field(default_factory=list)
    remote_ms: list[float] = field(default_factory=list)
    ring_us: list[float] = field(default_factory=list)
    wrong: int = 0


def host(name: str, socket: Path, count: int, orders: Any) -> None:
    """A process of one host: looks at all photographs once, and at what it has then once more."""
    encoder = Encoder()
    pictures = photographs.load_all(SIDE)[:count]
    order = random.Random(name)
    looked = Looked()
    with tensord.Client(socket, name=name, required=True) as cache:
        orders.send("ready")
        orders.recv()
        for picture in order.sample(pictures, len(pictures)):
            encoded: list[float] = []

            def encode(pixels: Any = picture.pixels, encoded: list[float] = encoded) -> Any:
                began = time.perf_counter()
                embedding = encoder.encode(pixels)
                encoded.append((time.perf_counter() - began) * 1e3)
                return embedding

            began = time.perf_counter()
            cache.get_or_compute(key_of(encoder, picture), encode, tokens=TOKENS, timeout_s=ENCODE_S_MAX)
            if encoded:
                looked.encoded.append(picture.name)
                looked.encode_ms += encoded
            else:
                looked.remote_ms.append((time.perf_counter() - began) * 1e3)
        for picture in pictures:
            began = time.perf_counter()
            lease = cache.get(key_of(encoder, picture))
            looked.ring_us.append((time.perf_counter() - began) * 1e6)
            looked.wrong += lease is None or not np.array_equal(lease.tree, encoder.encode(picture.pixels))
        remote = cache.status()
        orders.send((looked, {**remote["remote"], **remote["store"]}))
        agent = orders.recv()
        engine = Engine(agent, cache, "numpy")
        engine.turn(greeting(agent))
        told = Conversation.begin(0)
        told.ask(QUESTIONS[agent])
        turn = engine.turn(told)
        while any(cache.status()["remote"][name] for name in ("queued", "writes")):
            time.sleep(0.01)
        orders.send(turn)
        orders.recv()


def greeting(agent: str) -> Conversation:
    """A short conversation that no other host has."""
    tokens = [BEGIN, *tokens_of(f"{agent}: {GREETING}")]
    told = Conversation([*tokens, *[PICTURE] * PICTURE_TOKENS], len(tokens), draw(OWN_PICTURE))
    told.ask(GREETING)
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description="Several hosts share one encoder's work.")
    parser.add_argument("--photographs", type=int, default=len(photographs.FILES), help="default: %(default)s")
    arguments = parser.parse_args()
    Encoder()  # builds the graph for all processes, if it is not cached
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensord-demo-")))
        url, under = stack.enter_context(hosts(HOSTS, folder))
        running = []
        for number in range(HOSTS):
            own = folder / f"host-{number}"
            own.mkdir()
            daemon = own_daemon(own, f"cluster-{number}", under=under[number], ring_bytes="64MiB", remote_url=url)
            socket = stack.enter_context(daemon)
            running.append(OwnProcess(f"host-{number}", host, socket, arguments.photographs))
            stack.callback(running[-1].end)
        for one in running:
            one.hear()
        for one in running:
            one.tell("go")
        told = [one.hear() for one in running]
        turns = []
        for one, agent in zip(running, AGENTS, strict=True):
            one.tell(agent)
            turns.append(one.hear())
    return tell(arguments.photographs, told) | tell_turns(turns)


def tell(count: int, told: list[tuple[Looked, dict[str, Any]]]) -> int:
    """Prints the results. Returns the exit status."""

    def each(values: list[float], show: Callable[[float], str]) -> str:
        return show(median(values)) if values else "-"

    heads = ["host", "encoded", "from others", "waited for", "read MB", "written MB"]
    rows = [[*heads, "encoding", "remote", "in the ring"]]
    for number, (looked, status) in enumerate(told):
        rows.append(
            [
                f"host-{number}",
                str(len(looked.encoded)),
                str(status["remote"].get("fetched", 0)),
                str(status["remote"].get("waited", 0)),
                f"{status['remote_read_bytes'] / 1e6:.1f}",
                f"{status['remote_written_bytes'] / 1e6:.1f}",
                each(looked.encode_ms, lambda ms: f"{ms:.0f} ms"),
                each(looked.remote_ms, lambda ms: f"{ms:.1f} ms"),
                each(looked.ring_us, lambda us: f"{us:.0f} µs"),
            ]
        )
    print(f"\n{aligned(rows)}\n")
    encoded = [name for looked, _ in told for name in looked.encoded]
    wrong = sum(looked.wrong for looked, _ in told)
    print(
        f"{HOSTS} hosts, {count} photographs: {len(encoded)} encodings in the cluster, "
        f"{HOSTS * count} without a store; {len(encoded) - len(set(encoded))} encoded twice, {wrong} wrong"
    )
    return 1 if wrong or not all(status["remote"].get("fetched") for _, status in told) else 0


def tell_turns(turns: list[Turn]) -> int:
    """Prints the answers' costs. Returns the exit status."""
    rows = [["host", "prompt", "cached", "computed", "without", "same tokens"]]
    for number, turn in enumerate(turns):
        counts = (turn.prompt_tokens, turn.matched, turn.computed, turn.computed_without)
        rows.append([f"host-{number}", *map(str, counts), "yes" if turn.same_tokens else "NO"])
    print(f"\n{aligned(rows)}\n")
    computed, without = (sum(getattr(turn, name) for turn in turns) for name in ("computed", "computed_without"))
    print(f"{len(turns)} prompts: {computed} tokens computed in the cluster, {without} without a store")
    return 1 if not all(turn.same_tokens for turn in turns) or not all(turn.matched for turn in turns[1:]) else 0


if __name__ == "__main__":
    sys.exit(main())
