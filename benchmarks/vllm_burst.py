"""Two vLLM engines receive the same new pictures at once: the number of encodings, and the time.

    python benchmarks/vllm_burst.py [--rounds N] [--pictures N] [--seqs N] [--encode-ms N]

Owns: these figures, for two engines with the connector and two without it. The pairs take turns, so that other load on
the machine affects both. The encoding of a picture is a sleep. In a round each engine of a pair receives the same
requests, one picture each, and both begin at once; a step takes a limited number of requests.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import mean, median
from typing import Final

from peers.tensord_peer import serving

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.vllm.engine import Engine
from tests.vllm.tiny_llava import write_tiny_llava

RING_BYTES: Final = 64 << 20
WARM_ROUNDS: Final = 1
_pictures = count(1)


def burst(pair: Sequence[Engine], pictures: Sequence[int]) -> tuple[int, float, float]:
    """The encodings of both engines, the mean seconds of a request, and the seconds until all are done."""
    before = [engine.encoded() for engine in pair]
    for engine in pair:
        for picture in pictures:
            engine.add(picture, tokens=1)
    for engine in pair:
        engine.tell("run")
    took_s = [engine.told() for engine in pair]
    encodings = sum(engine.encoded() - known for engine, known in zip(pair, before, strict=True))
    return encodings, mean(mean(took) for took in took_s), max(max(took) for took in took_s)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Gives two engines the same new pictures at once.")
    parser.add_argument("--rounds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--pictures", type=int, default=24, help="default: %(default)s")
    parser.add_argument("--seqs", type=int, default=8, help="most requests in a step; default: %(default)s")
    parser.add_argument("--encode-ms", type=float, default=35.0, help="time to encode a picture; default: %(default)s")
    given = parser.parse_args(argv)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensord-")))
        model = write_tiny_llava(folder / "model")
        daemon = stack.enter_context(serving(RING_BYTES, folder=folder))
        options = {"max_num_seqs": given.seqs, "max_num_batched_tokens": 256 * given.seqs}
        plain, shared = (
            [
                stack.enter_context(Engine(model, folder / f"{socket is None}{number}.log", socket=socket, **options))
                for number in range(2)
            ]
            for socket in (None, daemon.socket)
        )
        for engine in (*plain, *shared):
            engine.wait_up()
            engine.ask("slow_encoder", seconds=0, each=given.encode_ms / 1e3)
        rows = []
        for number in range(WARM_ROUNDS + given.rounds):
            pictures = [next(_pictures) for _ in range(given.pictures)]
            pairs = [plain, shared] if number % 2 else [shared, plain]
            found = {id(pair): burst(pair, pictures) for pair in pairs}
            (_, plain_s, plain_all_s), (encodings, shared_s, shared_all_s) = found[id(plain)], found[id(shared)]
            row = {
                "encodings": encodings,
                "request_s": round(shared_s, 3),
                "request_without_s": round(plain_s, 3),
                "all_s": round(shared_all_s, 3),
                "all_without_s": round(plain_all_s, 3),
            }
            print(json.dumps(row), flush=True)
            rows += [row] if number >= WARM_ROUNDS else []
    print(
        f"encodings of {given.pictures} pictures in two engines: median {median(row['encodings'] for row in rows)}, "
        f"most {max(row['encodings'] for row in rows)}"
    )
    for name in ("request", "all"):
        ratios = sorted(row[f"{name}_s"] / row[f"{name}_without_s"] for row in rows)
        print(f"{name}: with over without: median {median(ratios):.2f}, most {ratios[-1]:.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
