"""The connector's cost for a vLLM engine with text requests, and its savings with picture requests.

    python benchmarks/vllm_text.py [--json PATH] [--rounds N] [--tokens N] [--pictures N]

Owns: these figures. The engines run in their own processes and take turns, so that other load on the machine affects
all of them. Two engines without the connector run beside each other; their ratio shows the noise. The model is tiny: a
step takes a few milliseconds, a fraction of a real one, so a cost shows larger than in practice.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Final

from peers.bars import Figure
from peers.tensord_peer import WAIT_S, serving

import tensord

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.vllm.engine import Engine
from tests.vllm.tiny_llava import write_tiny_llava

RING_BYTES: Final = 64 << 20
WARM_ROUNDS: Final = 5
ENCODE_S: Final = 0.05
"""The time of a vision tower of a few hundred million weights on a GPU. It is a sleep."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median over rounds, and the quartiles of the rounds' ratios."""

    name: str
    value: float
    lower: float
    upper: float
    rounds: int


def text_spreads(plain: Engine, control: Engine, connected: Engine, rounds: int, tokens: int) -> list[Spread]:
    """The time of text requests with the connector, and in a second engine without it, each over an engine without it.

    A round is six requests in the order a b c c b a, so that a drift of the machine's speed cancels out.
    """
    engines = (plain, control, connected)
    against_control, against_connected, steps_ms = [], [], []
    for number in range(WARM_ROUNDS + rounds):
        took_s = [0.0, 0.0, 0.0]
        for turn in (0, 1, 2, 2, 1, 0):
            took_s[turn] += engines[turn].generate(text=f"tell me of {number}", tokens=tokens, likely=0).took_s
        if number >= WARM_ROUNDS:
            against_control.append(took_s[1] / took_s[0])
            against_connected.append(took_s[2] / took_s[0])
            steps_ms.append(took_s[0] / 2 / tokens * 1e3)
    return [
        spread("text: with the connector, against without", against_connected),
        spread("text: a second engine without, against the first", against_control),
        spread("text: a step without, ms", steps_ms),
    ]


def picture_spreads(
    plain: Engine, first: Engine, second: Engine, socket: Path, pictures: int
) -> tuple[list[Spread], Figure]:
    """The time of a new picture without the connector, in the first engine with it, and in the second."""
    took_ms: list[list[float]] = [[], [], []]
    for engine in (plain, first, second):
        engine.ask("slow_encoder", seconds=ENCODE_S)
    before = second.encoded()
    with tensord.Client(socket) as client:
        there = client.status()["store"]["entries"]
        for number in range(1, pictures + 1):
            took_ms[0].append(plain.generate(number, likely=0).took_s * 1e3)
            took_ms[1].append(first.generate(number, likely=0).took_s * 1e3)
            _wait_for_entries(client, there + number)
            took_ms[2].append(second.generate(number, likely=0).took_s * 1e3)
    spreads = [
        spread("picture: without the connector, ms", took_ms[0]),
        spread("picture: the first engine with it, ms", took_ms[1]),
        spread("picture: the second engine, ms", took_ms[2]),
    ]
    runs = second.encoded() - before
    return spreads, Figure(f"encoder runs in the second engine, of {pictures} pictures", runs, 0, "")


def call_spreads(connected: Engine, picture: int, tokens: int) -> list[Spread]:
    """The time of the scheduler and of its calls into the connector while a request with a picture decodes, in µs."""
    connected.ask("spent")
    connected.generate(picture, tokens=tokens, likely=0)
    spent: dict[str, list[float]] = connected.ask("spent")
    # The first steps look up the picture.
    return [
        spread(f"decoding: {name}, µs", [took_s * 1e6 for took_s in calls[4:]])
        for name, calls in spent.items()
        if len(calls) > 8
    ]


def _wait_for_entries(client: tensord.Client, count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while client.status()["store"]["entries"] < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the first engine's encodings were not stored within {WAIT_S} s")
        time.sleep(0.002)


def spread(name: str, values: Sequence[float]) -> Spread:
    """The median and the quartiles of at least two values."""
    lower, _, upper = quantiles(values, n=4)
    return Spread(name, median(values), lower, upper, len(values))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measures the costs and savings of the connector in a vLLM engine.")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    parser.add_argument("--rounds", type=int, default=150, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a text answer; default: %(default)s")
    parser.add_argument("--pictures", type=int, default=30, help="default: %(default)s")
    given = parser.parse_args(argv)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensord-")))
        model = write_tiny_llava(folder / "model")
        daemon = stack.enter_context(serving(RING_BYTES, folder=folder))
        engines = [stack.enter_context(Engine(model, folder / f"plain{number}.log")) for number in range(2)]
        engines += [
            stack.enter_context(Engine(model, folder / f"connected{number}.log", socket=daemon.socket))
            for number in range(2)
        ]
        for engine in engines:
            engine.wait_up()
        plain, control, connected, second = engines
        spreads = text_spreads(plain, control, connected, given.rounds, given.tokens)
        more, runs = picture_spreads(plain, connected, second, daemon.socket, given.pictures)
        spreads += more
        spreads += call_spreads(second, given.pictures, given.tokens)
    figures = [Figure("text with the connector, against without", spreads[0].value, 1.01, "×"), runs]
    for spread in spreads:
        print(f"{spread.name:<55} {spread.value:9.4f}  quartiles {spread.lower:.4f} to {spread.upper:.4f}")
    for figure in figures:
        print(f"{figure.name:<55} {figure.value:9.4f}  at most {figure.limit}")
    if given.json:
        told = {"figures": [asdict(one) for one in figures], "spreads": [asdict(one) for one in spreads]}
        given.json.write_text(json.dumps(told, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
