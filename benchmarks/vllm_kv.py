"""Conversations over two vLLM engines that take turns: tokens computed, time to first token, and the cost of storing.

    python benchmarks/vllm_kv.py [--json PATH] [--quick] [--conversations N] [--turns N] [--rounds N]

Owns: these figures, for a pair of engines with TensordKVConnector and a pair without a KV connector. Each turn of a
conversation goes to the other engine of the pair. Both pairs get the same requests, one after the other, so that other
load on the machine affects both. Requests that share nothing are timed on all four engines by turns; engines of one
pair show the noise.

The model is small: computing a token takes it a small part of the time that a real model takes, and loading a token's
KV takes about as long. So savings of time show smaller than in practice, and costs larger.
"""

from __future__ import annotations

import argparse
import json
import string
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final

from peers.tensord_peer import WAIT_S, serving
from vllm_text import Spread, spread

import tensord

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.vllm.engine import Engine
from tests.vllm.tiny_llava import write_tiny_llava

RING_BYTES: Final = 256 << 20
WITHOUT, WITH = "without", "tensord"
BAR: Final = 0.98
"""Throughput of requests that share nothing: at least this share of an engine without the connector."""
INNER: Final = 4096
"""The model's inner width. A prompt of 1,000 tokens takes 0.1 s, far more than the engine's own work for a step."""
POSITIONS: Final = 2048
TURN_TOKENS: Final = 200
"""New tokens of a turn: the last answer and the next question. The model has one token for each letter."""
ALONE_TOKENS: Final = 600
OPTIONS: Final[dict[str, Any]] = {
    "enable_prefix_caching": True,
    "max_model_len": POSITIONS,
    "max_num_batched_tokens": POSITIONS,
    "max_num_seqs": 8,
    "block_size": 32,
    # All conversations fit into an engine's own cache.
    "kv_cache_memory_bytes": 256 << 20,
}
_warm = count(1)


@dataclass
class Talk:
    """What the conversations took one pair of engines.

    `first_ms`: milliseconds to the first token, of each request whose conversation is new, then of each other one, in
    the order of the requests. `answers`: the tokens of all answers.
    """

    computed: int = 0
    first_ms: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    answers: list[list[int]] = field(default_factory=list)


def text_of(name: str, characters: int) -> str:
    """A text that shares no block with a text of another name."""
    return "".join(Random(name).choices(string.ascii_lowercase + " ", k=characters))


def converse(
    pairs: Mapping[str, Sequence[Engine]], client: tensord.Client, conversations: int, turns: int
) -> dict[str, Talk]:
    """All conversations' first turns, then all second turns, and so on; each turn on the other engine of the pair.

    The blocks of a turn are stored before the next turn begins: a user takes longer to answer.
    """
    talks = {name: Talk(-sum(engine.ask("computed") for engine in pair)) for name, pair in pairs.items()}
    prompts = [""] * conversations
    for turn in range(turns):
        for number in range(conversations):
            prompts[number] += text_of(f"conversation {number} turn {turn}", TURN_TOKENS)
            # Of two conversations in a row one begins on the first engine, the other on the second one.
            names = sorted(pairs, reverse=number // 2 % 2 == 1)
            for name in names:
                answer = pairs[name][(number + turn) % 2].generate(text=prompts[number], tokens=1, likely=0)
                talks[name].first_ms[turn > 0].append(answer.took_s * 1e3)
                talks[name].answers.append(answer.tokens)
        for engine in pairs[WITH]:
            settle(engine, client)
    for name, pair in pairs.items():
        talks[name].computed += sum(engine.ask("computed") for engine in pair)
    return talks


def settle(engine: Engine, client: tensord.Client) -> None:
    """Returns when all blocks of the engine's requests are stored. Raises RuntimeError if they are not in time."""
    engine.ask("settle")
    before: dict[str, int] = {}

    def is_quiet() -> bool:
        nonlocal before
        last, before = before, client.status()["store"]["puts"]
        return before == last

    wait_for(is_quiet, "the engine's blocks are stored")


def warm(engine: Engine) -> None:
    """One request, with a text that no engine has seen."""
    engine.generate(text=text_of(f"warm {next(_warm)}", TURN_TOKENS), tokens=2, likely=0)


def stores(engine: Engine, client: tensord.Client) -> bool:
    """Whether the engine stores the blocks of a new request: it does so once it is connected to the daemon."""
    there = client.status()["store"]["entries"]
    warm(engine)
    settle(engine, client)
    return bool(client.status()["store"]["entries"] > there)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Returns when `condition()` is true. Raises RuntimeError if it is not within WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"timed out after {WAIT_S} s: {what}")
        time.sleep(0.002)


def throughputs(
    pairs: Mapping[str, Sequence[Engine]], client: tensord.Client, rounds: int, requests: int, tokens: int
) -> list[Spread]:
    """Requests a second where no request shares anything: both engines with the connector over both without it.

    Two equal engines differ by up to a tenth for as long as they run, so their ratios are shown too. A round is eight
    batches in the order a b c d d c b a, so that a drift of the machine's speed cancels out. The blocks of a batch's
    prompts are stored while its answers are decoded.
    """
    engines = [*pairs[WITHOUT], *pairs[WITH]]
    order = [*range(len(engines)), *reversed(range(len(engines)))]
    took: list[list[float]] = []
    for number in range(-1, rounds):  # the first one is not measured
        took_s = [0.0] * len(engines)
        for place, turn in enumerate(order):
            for request in range(requests):
                engines[turn].add(text=text_of(f"alone {number} {place} {request}", ALONE_TOKENS), tokens=tokens)
            took_s[turn] += engines[turn].ask("run")
            if engines[turn] in pairs[WITH]:
                settle(engines[turn], client)
        if number >= 0:
            took.append(took_s)
    return [
        spread("alone: throughput with tensord, against without", [(a + b) / (c + d) for a, b, c, d in took]),
        spread("alone: a second engine without, against the first", [a / b for a, b, _, _ in took]),
        spread("alone: a second engine with, against the first", [c / d for _, _, c, d in took]),
        spread("alone: requests a second without", [4 * requests / (a + b) for a, b, _, _ in took]),
    ]


def first_token_spreads(talks: Mapping[str, Talk]) -> list[Spread]:
    """Times to the first token of each pair, and the median over requests of their ratio."""
    spreads = []
    for later, turns in enumerate(("first turn", "later turns")):
        took_ms = {name: talk.first_ms[later] for name, talk in talks.items()}
        spreads += [spread(f"{turns}: first token, {name}, ms", took) for name, took in took_ms.items()]
        ratios = [mine / base for mine, base in zip(took_ms[WITH], took_ms[WITHOUT], strict=True)]
        spreads.append(spread(f"{turns}: first token, tensord against without", ratios))
    return spreads


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Conversations over two vLLM engines, with and without tensord.")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="a short form, to check that it runs")
    parser.add_argument("--conversations", type=int, default=50, help="at least 2; default: %(default)s")
    parser.add_argument("--turns", type=int, default=8, help="2 to 9; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=30, help="at least 2; default: %(default)s")
    given = parser.parse_args(argv)
    if given.conversations < 2 or given.rounds < 2 or not 2 <= given.turns <= 9:
        parser.error("--conversations and --rounds are at least 2, --turns is 2 to 9")
    conversations, turns, rounds = (2, 3, 2) if given.quick else (given.conversations, given.turns, given.rounds)
    requests, tokens = (2, 4) if given.quick else (8, 16)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensord-")))
        model = write_tiny_llava(folder / "model", inner=INNER, positions=POSITIONS)
        daemon = stack.enter_context(serving(RING_BYTES, folder=folder))
        transfer = {
            "kv_connector": "TensordKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"tensord.socket": str(daemon.socket)},
        }
        extra: dict[str, dict[str, Any]] = {WITHOUT: {}, WITH: {"kv_transfer_config": transfer}}
        pairs = {
            name: [
                stack.enter_context(Engine(model, folder / f"{name}{number}.log", **OPTIONS, **more))
                for number in range(2)
            ]
            for name, more in extra.items()
        }
        client = stack.enter_context(tensord.Client(daemon.socket, timeout_s=WAIT_S, required=True))
        for engine in pairs[WITHOUT]:
            warm(engine)
        for engine in pairs[WITH]:
            wait_for(partial(stores, engine, client), "the engine stores blocks")
        talks = converse(pairs, client, conversations, turns)
        spreads = first_token_spreads(talks)
        spreads += throughputs(pairs, client, rounds, requests, tokens)
    report(talks, spreads, conversations * turns * TURN_TOKENS, given.json)
    return 0


def report(talks: Mapping[str, Talk], spreads: Sequence[Spread], new: int, path: Path | None) -> None:
    """Prints the figures, and writes them to `path`."""
    computed = {name: talk.computed for name, talk in talks.items()}
    differ = sum(mine != base for mine, base in zip(talks[WITH].answers, talks[WITHOUT].answers, strict=True))
    print(f"{len(talks[WITH].answers)} requests, {new} tokens that no request had before")
    for name, tokens in computed.items():
        print(f"{f'tokens computed, {name}':<55} {tokens:9}")
    print(f"{'tokens computed, tensord against without':<55} {computed[WITH] / computed[WITHOUT]:9.4f}")
    print(f"{'answers of tensord that differ':<55} {differ:9}")
    for one in spreads:
        print(f"{one.name:<55} {one.value:9.4f}  quartiles {one.lower:.4f} to {one.upper:.4f}")
    (throughput,) = [one.value for one in spreads if one.name.startswith("alone: throughput")]
    print(f"throughput: bar ≥ {BAR}, {'reached' if throughput >= BAR else 'missed'}")
    if path:
        told = {
            "computed": computed,
            "new_tokens": new,
            "answers_that_differ": differ,
            "bar": {"throughput": BAR},
            "spreads": [asdict(one) for one in spreads],
        }
        path.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
