"""Three agents with one long system prompt and a picture: what one has computed, the others continue from.

    python examples/chat_prefix.py [--json PATH] [--model transformers|torch|numpy]

Three processes run the same tiny decoder (`tiny_decoder.py`: real keys and values, random weights, no downloads). At
each turn an agent asks the cache for the longest cached prefix of its prompt, picture included, takes its keys and
values as they lie in shared memory, computes the rest, generates 24 tokens greedily, and puts back what its sequence
has become. Then it generates the same from nothing, without the cache, and compares.

Token for token it has to be equal. Bit for bit the keys and values need not be: a library sums in another order where
it gets the same tokens in other portions, so those are compared within DIFFERENCE_MAX.

First all three are asked something, then each gets a follow-up question, then one is shown another picture: its match
stops exactly where the picture begins, and the prompt before it is used all the same. The exit status is 1 if a token
differs, or a match was not as long as it can be.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
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
from tiny_decoder import PICTURE_TOKENS, Decoder, Keys

import tensord

GENERATED: Final = 24
PORTION_TOKENS: Final = 256
DIFFERENCE_MAX: Final = 1e-3  # of values around 1
RING_BYTES: Final = 64 << 20
PATIENCE_S: Final = 60.0


# ---- a turn


@dataclass(frozen=True)
class Generated:
    """What came of a prompt, and what it took."""

    tokens: list[int]
    keys: Keys
    computed: int
    pictures: int


@dataclass(frozen=True)
class Turn:
    """What an agent tells of one of its turns. Tokens that were computed are the prompt's and the generated ones."""

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
    """The prompt's tokens from `offset` on after `past`, in portions, and then token by token the likeliest."""
    tokens = np.array(told.tokens)
    end = told.picture_at + PICTURE_TOKENS
    rows = model.embed(tokens[offset:])
    pictures = 0
    if offset < end:  # a match ends before a picture or behind it, never inside
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
    """An agent's process: a model, and the cache that it shares with the others."""

    def __init__(self, agent: str, client: tensord.Client, kind: tiny_decoder.Kind) -> None:
        self.agent = agent
        self.model = tiny_decoder.decoder(kind)
        # Whoever runs the model by another library has other last bits: those are other keys and values.
        namespace = tensord.Namespace(
            model="tiny-decoder", revision=f"seed-{tiny_decoder.SEED}", dtype="float32", processor=self.model.name
        )
        self.cache = tensord.PrefixCache(client, namespace)

    def turn(self, told: Conversation) -> Turn:
        """Generates, with the cache and then without it, and adds what was said to the conversation."""
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
            # In one piece, as this model wants it. Paged attention takes the blocks where they lie in the ring, as
            # match.layers has them.
            past = [self._own(match.joined(layer)) for layer in range(tiny_decoder.LAYERS)]
            return generate(self.model, told, past, match.offset), match.offset

    def _own(self, layer: dict[str, Any]) -> tuple[Any, Any]:
        return self.model.take(layer["key"]), self.model.take(layer["value"])

    def _keep(self, told: Conversation, keys: Keys, cost_ms: float) -> int:
        """Puts the sequence back, the generated tokens with it: how many tokens that are. The last one was never an
        input, so nothing is known of it."""
        covered = len(told.tokens) - 1
        layers = [tensord.NormalLayer({"key": key, "value": value}, axis=-2) for key, value in keys]
        tokens = np.array(told.tokens[:covered], np.uint32)
        put = self.cache.put(tokens, layers, media=told.media, agent=self.agent, cost_ms=cost_ms, wait=True)
        if put.error is not None:
            raise put.error
        return covered


def difference(ours: Keys, theirs: Keys) -> float:
    """The largest one between any two numbers; infinite where they do not cover the same."""
    found = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        for one, another in zip(mine, other, strict=True):
            if one.shape != another.shape:
                return float("inf")
            found = max(found, float(abs(np.asarray(one) - np.asarray(another)).max()))
    return found


def be_agent(agent: str, socket: Path, kind: tiny_decoder.Kind, orders: Connection) -> None:
    """Does as it is told over `orders`: (picture, question) begins a conversation, (None, question) goes on."""
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
    """All turns by rounds, and where the picture begins and ends in each prompt."""

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
        """What is not as it should be."""
        picture_ends = self.picture_at + PICTURE_TOKENS
        wanted: list[tuple[bool, str]] = []
        for turn in self.turns:
            who = f"{turn.agent}, {turn.prompt_tokens} tokens"
            wanted.append((turn.same_tokens, f"{who}: continued, it says something else than from nothing"))
            wanted.append((turn.difference <= DIFFERENCE_MAX, f"{who}: keys and values are {turn.difference:g} apart"))
        wanted += [(turn.matched == 0, f"{turn.agent} found something in an empty cache") for turn in self.first[:1]]
        for turn in self.first[1:]:
            wanted.append((turn.matched >= picture_ends, f"{turn.agent} did not continue behind the shared picture"))
        for before, turn in zip(self.first, self.follow_up, strict=True):
            wanted.append((turn.matched == before.kept, f"{turn.agent} did not continue its own conversation"))
        for turn in self.other_picture:
            wanted.append((turn.matched == self.picture_at, f"{turn.agent} did not stop at the other picture"))
        computed, without = (sum(getattr(t, name) for t in self.turns) for name in ("computed", "computed_without"))
        wanted.append((computed < without, "nothing was saved"))
        return [text for fulfilled, text in wanted if not fulfilled]


@contextmanager
def own_daemon(folder: Path) -> Iterator[Path]:
    """A daemon with a name and sockets of its own; gives its control socket."""
    socket = folder / "control.sock"
    named = ["--config", os.devnull, "--instance", f"demo-prefix-{os.getpid()}", "--socket", str(socket)]
    sized = ["--ring-bytes", str(RING_BYTES), "--log-level", "warning"]
    ours = {name: value for name, value in os.environ.items() if not name.startswith("TENSORD_")}
    process = subprocess.Popen([sys.executable, "-m", "tensord.daemon", *named, *sized], env=ours)
    try:
        with tensord.Client(socket) as client:
            deadline = time.monotonic() + PATIENCE_S
            while not client.wait_connected(0.1):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the daemon did not serve; exit code {process.returncode}")
        yield socket
    finally:
        process.send_signal(signal.SIGINT)  # SIGTERM would keep its memory for the next daemon
        process.wait(PATIENCE_S)


class Agent:
    """An agent's process, as the demonstration sees it."""

    def __init__(self, name: str, socket: Path, kind: tiny_decoder.Kind) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.name = name
        self._orders, theirs = spawn.Pipe()
        self._process = spawn.Process(target=be_agent, args=(name, socket, kind, theirs), daemon=True)
        self._process.start()
        theirs.close()  # so that the pipe ends with the process

    def ready(self) -> None:
        self._answer()

    def ask(self, question: str, picture: int | None = None) -> Turn:
        """Has it take its turn; with a picture, in a conversation of its own."""
        self._orders.send((picture, question))
        turn: Turn = self._answer()
        return turn

    def end(self) -> None:
        try:
            self._orders.send(None)
        except BrokenPipeError:
            pass
        self._process.join(PATIENCE_S)

    def _answer(self) -> Any:
        if not self._orders.poll(PATIENCE_S):
            raise RuntimeError(f"{self.name} did not answer within {PATIENCE_S:g} s")
        try:
            return self._orders.recv()
        except EOFError:
            self._process.join(PATIENCE_S)
            raise RuntimeError(f"{self.name} ended with exit code {self._process.exitcode}") from None


@contextmanager
def one_thread_each() -> Iterator[None]:
    """What is started meanwhile computes on one thread: three processes share the machine."""
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
    """All rounds, told as they come."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensord-demo-")))
        socket = stack.enter_context(own_daemon(folder))
        agents = []
        with one_thread_each():
            for name in AGENTS:
                agents.append(Agent(name, socket, kind))
                stack.callback(agents[-1].end)
        for agent in agents:
            agent.ready()
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
    """Sums over all turns, and of each agent."""
    names = ("computed", "computed_without", "pictures", "pictures_without")
    found = {name: sum(getattr(turn, name) for turn in seen.turns) for name in names}
    for agent in AGENTS:
        for name in names[:2]:
            found[f"{agent}_{name}"] = sum(getattr(turn, name) for turn in seen.turns if turn.agent == agent)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Three agents continue from what one of them has computed.")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write what was seen there")
    kinds = ("transformers", "torch", "numpy")
    parser.add_argument("--model", choices=kinds, help="what runs it; default: the first of them that is installed")
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
    print(f"keys and values, continued against from nothing: {furthest:.1g} apart at most")
    if given.json:
        given.json.write_text(json.dumps({**asdict(seen), **found}, indent=1) + "\n")
    for failure in seen.failures:
        print(f"chat_prefix: {failure}", file=sys.stderr)
    return 1 if seen.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
