"""Three agents share a long system prompt and a picture: each reuses the keys and values that another computed.

    python examples/chat_prefix.py [--json PATH] [--model transformers|torch|numpy]

Three processes run the same tiny decoder (`tiny_decoder.py`: real keys and values, random weights, no downloads). At
each turn an agent asks the cache for the longest cached prefix of its prompt, with the picture. The agent reads the
keys and values of the prefix in shared memory, computes the rest, generates 24 tokens greedily, and puts its longer
sequence into the cache. Then it generates the same without the cache, and compares.

The tokens have to be equal. The keys and values may differ in their last bits, because a library sums in another order
for other batches of tokens; they are compared within DIFFERENCE_MAX.

In the first round all three agents get a question, and in the second a follow-up question. In the third round one agent
sees another picture: its match ends exactly before the picture, and the prompt before the picture is still reused. The
exit status is 1 if a token differs, or if a match was shorter than possible.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import tiny_decoder
from conversation import AGENTS, FOLLOW_UP, QUESTIONS, Conversation
from demonstration import PATIENCE_S, OwnProcess, own_daemon
from tiny_decoder import PICTURE_TOKENS, Decoder, Keys

import tensord

GENERATED: Final = 24
PORTION_TOKENS: Final = 256
DIFFERENCE_MAX: Final = 1e-3  # of values around 1
RING_BYTES: Final = 64 << 20


# ---- a turn


@dataclass(frozen=True)
class Generated:
    """The result of a prompt, and its cost."""

    tokens: list[int]
    keys: Keys
    computed: int
    pictures: int


@dataclass(frozen=True)
class Turn:
    """The report of one turn. The computed tokens are those of the prompt and the generated ones."""

    agent: str
    prompt_tokens: int
    matched: int
    computed: int
    computed_without: int
    pictures: int
    pictures_without: int
    same_tokens: bool
    difference: float
    kept: int
    said: str


def generate(model: Decoder, told: Conversation, past: Keys, offset: int) -> Generated:
    """Computes the prompt from `offset` on after `past`, in batches; then generates the likeliest tokens."""
    tokens = np.array(told.tokens)
    end = told.picture_at + PICTURE_TOKENS
    rows = model.embed(tokens[offset:])
    pictures = 0
    if offset < end:  # a match ends before or after a picture, never within it
        rows[told.picture_at - offset : end - offset] = model.see(told.pixels)
        pictures = 1
    logits = None
    for at in range(0, len(rows), PORTION_TOKENS):
        past, logits = model.forward(rows[at : at + PORTION_TOKENS], past)
    generated = [int(logits.argmax())]  # type: ignore[union-attr] # a match leaves one token at least
    while len(generated) < GENERATED:
        past, logits = model.forward(model.embed(np.array(generated[-1:])), past)
        generated.append(int(logits.argmax()))
    return Generated(generated, past, len(rows) + GENERATED - 1, pictures)


class Engine:
    """An agent's process: a model, and the shared cache."""

    def __init__(self, agent: str, client: tensord.Client, kind: tiny_decoder.Kind) -> None:
        self.agent = agent
        self.model = tiny_decoder.decoder(kind)
        # Another library computes other last bits: its keys and values have another name.
        namespace = tensord.Namespace(
            model="tiny-decoder", revision=f"seed-{tiny_decoder.SEED}", dtype="float32", processor=self.model.name
        )
        self.cache = tensord.PrefixCache(client, namespace)

    def turn(self, told: Conversation) -> Turn:
        """Generates with the cache and without it, and adds the answer to the conversation."""
        began = time.monotonic()
        with_cache, offset = self._generate(told)
        cost_ms = (time.monotonic() - began) * 1e3
        scratch = generate(self.model, told, [], 0)
        prompt = len(told.tokens)
        told.tokens += with_cache.tokens
        kept = self._keep(told, with_cache.keys, cost_ms)
        self.cache.turn_ended(self.agent)
        return Turn(
            self.agent,
            prompt,
            offset,
            with_cache.computed,
            scratch.computed,
            with_cache.pictures,
            scratch.pictures,
            with_cache.tokens == scratch.tokens,
            difference(with_cache.keys, scratch.keys),
            kept,
            tiny_decoder.text_of(with_cache.tokens),
        )

    def _generate(self, told: Conversation) -> tuple[Generated, int]:
        match = self.cache.match(np.array(told.tokens, np.uint32), media=told.media, agent=self.agent)
        if match is None:
            return generate(self.model, told, [], 0), 0
        with match:
            # This model takes one array. Paged attention reads the blocks in place in the ring, as match.layers gives
            # them.
            past = [self._own(match.joined(layer)) for layer in range(tiny_decoder.LAYERS)]
            return generate(self.model, told, past, match.offset), match.offset

    def _own(self, layer: dict[str, Any]) -> tuple[Any, Any]:
        return self.model.take(layer["key"]), self.model.take(layer["value"])

    def _keep(self, told: Conversation, keys: Keys, cost_ms: float) -> int:
        """Puts the sequence with its generated tokens into the cache. Returns the number of tokens.

        The last token was never an input, so it has no keys and values.
        """
        covered = len(told.tokens) - 1
        layers = [tensord.NormalLayer({"key": key, "value": value}, axis=-2) for key, value in keys]
        tokens = np.array(told.tokens[:covered], np.uint32)
        put = self.cache.put(tokens, layers, media=told.media, agent=self.agent, cost_ms=cost_ms, wait=True)
        if put.error is not None:
            raise put.error
        return covered


def difference(ours: Keys, theirs: Keys) -> float:
    """The largest difference between two numbers; infinite if the shapes differ."""
    found = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        for one, another in zip(mine, other, strict=True):
            if one.shape != another.shape:
                return float("inf")
            found = max(found, float(abs(np.asarray(one) - np.asarray(another)).max()))
    return found


def be_agent(agent: str, socket: Path, kind: tiny_decoder.Kind, orders: Connection) -> None:
    """Carries out `orders`: (picture, question) begins a conversation, (None, question) continues it."""
    with tensord.Client(socket, name=agent, timeout_s=PATIENCE_S, required=True) as client:
        engine = Engine(agent, client, kind)
        told = Conversation.begin(0)
        orders.send("ready")
        while (order := orders.recv()) is not None:
            picture, question = order
            if picture is not None:
                told = Conversation.begin(picture)
            told.ask(question)
            orders.send(engine.turn(told))


# ---- the demonstration


@dataclass
class Seen:
    """All turns by rounds, and the offsets of the picture in each prompt."""

    model: str
    picture_at: int
    first: list[Turn] = field(default_factory=list)
    follow_up: list[Turn] = field(default_factory=list)
    other_picture: list[Turn] = field(default_factory=list)

    @property
    def turns(self) -> list[Turn]:
        return [*self.first, *self.follow_up, *self.other_picture]

    @property
    def failures(self) -> list[str]:
        """The failed expectations, one line each."""
        picture_ends = self.picture_at + PICTURE_TOKENS
        wanted: list[tuple[bool, str]] = []
        for turn in self.turns:
            who = f"{turn.agent}, {turn.prompt_tokens} tokens"
            wanted.append((turn.same_tokens, f"{who}: the answer with the cache differs from the answer without it"))
            wanted.append((turn.difference <= DIFFERENCE_MAX, f"{who}: keys and values differ by {turn.difference:g}"))
        wanted += [(turn.matched == 0, f"{turn.agent} had a hit in an empty cache") for turn in self.first[:1]]
        for turn in self.first[1:]:
            wanted.append((turn.matched >= picture_ends, f"{turn.agent} had no hit that includes the shared picture"))
        for before, turn in zip(self.first, self.follow_up, strict=True):
            wanted.append((turn.matched == before.kept, f"{turn.agent} did not continue its own conversation"))
        for turn in self.other_picture:
            wanted.append((turn.matched == self.picture_at, f"{turn.agent} did not end its hit at the other picture"))
        computed, without = (sum(getattr(t, name) for t in self.turns) for name in ("computed", "computed_without"))
        wanted.append((computed < without, "the cache saved no tokens"))
        return [text for fulfilled, text in wanted if not fulfilled]


class Agent(OwnProcess):
    """An agent's process."""

    def __init__(self, name: str, socket: Path, kind: tiny_decoder.Kind) -> None:
        super().__init__(name, be_agent, socket, kind)

    def ask(self, question: str, picture: int | None = None) -> Turn:
        """Runs one turn of the agent; with a picture, in a new conversation."""
        self.tell((picture, question))
        turn: Turn = self.hear()
        return turn


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Limits the processes that start within the block to one thread: three processes share the machine."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run(kind: tiny_decoder.Kind) -> Seen:
    """Runs and prints all rounds."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensord-demo-")))
        socket = stack.enter_context(own_daemon(folder, "prefix", ring_bytes=RING_BYTES))
        agents = []
        with one_thread_each():
            for name in AGENTS:
                agents.append(Agent(name, socket, kind))
                stack.callback(agents[-1].end)
        for agent in agents:
            agent.hear()
        seen = Seen(kind, Conversation.begin(0).picture_at)
        print(
            f"{len(AGENTS)} agents; a system prompt of {seen.picture_at} tokens, a picture of {PICTURE_TOKENS}; "
            f"keys and values of a tiny decoder in {kind}\n\n"
            f"{'':<28} {'prompt':>6} {'cached':>6} {'computed':>8} {'without':>7}  {'pictures':>8}  same tokens",
            flush=True,
        )
        for agent in agents:
            seen.first.append(agent.ask(QUESTIONS[agent.name]))
            tell("a question", seen.first[-1])
        for agent in agents:
            seen.follow_up.append(agent.ask(FOLLOW_UP))
            tell("a follow-up", seen.follow_up[-1])
        seen.other_picture.append(agents[-1].ask(QUESTIONS[agents[-1].name], picture=1))
        tell("another picture", seen.other_picture[-1])
    return seen


def tell(what: str, turn: Turn) -> None:
    numbers = f"{turn.prompt_tokens:>6} {turn.matched:>6} {turn.computed:>8} {turn.computed_without:>7}"
    same = "yes" if turn.same_tokens else "NO"
    print(f"{turn.agent:<8} {what:<19} {numbers}  {turn.pictures:>3} of {turn.pictures_without}  {same}", flush=True)


def totals(seen: Seen) -> dict[str, int]:
    """Sums over all turns, and for each agent."""
    names = ("computed", "computed_without", "pictures", "pictures_without")
    found = {name: sum(getattr(turn, name) for turn in seen.turns) for name in names}
    for agent in AGENTS:
        for name in names[:2]:
            found[f"{agent}_{name}"] = sum(getattr(turn, name) for turn in seen.turns if turn.agent == agent)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Three agents share a prompt through the prefix cache.")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the turns and the sums there")
    kinds = ("transformers", "torch", "numpy")
    parser.add_argument("--model", choices=kinds, help="the library of the model; default: the first that is installed")
    given = parser.parse_args(argv)
    seen = run(given.model or tiny_decoder.best_kind())
    found = totals(seen)
    print()
    for agent in AGENTS:
        computed, without = found[f"{agent}_computed"], found[f"{agent}_computed_without"]
        print(f"{agent:<8} {computed:>6} tokens computed, without {without:>6}")
    print(f"{'in all':<8} {found['computed']:>6} tokens computed, without {found['computed_without']:>6}")
    print(f"{'':<8} {found['pictures']:>6} pictures encoded, without {found['pictures_without']:>5}")
    furthest = max(turn.difference for turn in seen.turns)
    print(f"keys and values, with the cache against without: {furthest:.1g} apart at most")
    if given.json:
        given.json.write_text(json.dumps({**asdict(seen), **found}, indent=1) + "\n")
    for failure in seen.failures:
        print(f"chat_prefix: {failure}", file=sys.stderr)
    return 1 if seen.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
