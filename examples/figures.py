"""The sums over the demo's processes: the figures, and the table. `aligned` prints tables of other examples too.

Owns: the sums. Does not own: the lookups (shared_vision.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

HEADS: Final = (
    "process",
    "lookups",
    "hits",
    "waits",
    "encoder runs",
    "encoder s",
    "saved s",
    "MB shared",
    "hit µs",
)


@dataclass
class Seen:
    """The lookups of one process. Every lookup is a hit, a wait or an encoder run.

    `encoded_s` has the processor seconds of each encoder run, by photograph. Wall time would grow with every process
    that competes for a core. `answered` has the photographs of hits and waits, `shared_bytes` the sizes of their
    embeddings, `hit_us` the microseconds of each hit.
    """

    lookups: int = 0
    hits: int = 0
    waits: int = 0
    shared_bytes: int = 0
    encoded_s: dict[str, float] = field(default_factory=dict)
    answered: list[str] = field(default_factory=list)
    hit_us: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Figures:
    """The sums over all processes.

    `saved_s` counts, for each lookup without an encoder run, the time of the encoder run of that photograph.
    """

    lookups: int
    encoder_runs: int
    photographs: int
    hits: int
    waits: int
    saved_s: float
    hit_median_us: float
    pins_after_kill: int


def figures(all_seen: Sequence[Seen], photographs: int, pins_after_kill: int) -> Figures:
    """The sums over all processes."""
    return Figures(
        lookups=sum(seen.lookups for seen in all_seen),
        encoder_runs=sum(len(seen.encoded_s) for seen in all_seen),
        photographs=photographs,
        hits=sum(seen.hits for seen in all_seen),
        waits=sum(seen.waits for seen in all_seen),
        saved_s=round(_saved_s(all_seen, all_seen), 3),
        hit_median_us=round(_hit_us(all_seen), 2),
        pins_after_kill=pins_after_kill,
    )


def table(all_seen: Sequence[Seen]) -> str:
    """One line for each process, and one for all."""

    def line(name: str, some: Sequence[Seen]) -> list[str]:
        return [
            name,
            str(sum(seen.lookups for seen in some)),
            str(sum(seen.hits for seen in some)),
            str(sum(seen.waits for seen in some)),
            str(sum(len(seen.encoded_s) for seen in some)),
            f"{sum(sum(seen.encoded_s.values()) for seen in some):.2f}",
            f"{_saved_s(some, all_seen):.2f}",
            f"{sum(seen.shared_bytes for seen in some) / 1e6:.1f}",
            f"{_hit_us(some):.1f}",
        ]

    lines = [list(HEADS)]
    lines += [line(str(number), [seen]) for number, seen in enumerate(all_seen, 1)]
    lines.append(line("all", all_seen))
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns of equal width; the first line is the head."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    written = ["  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in lines]
    return "\n".join([written[0], "-" * len(written[0]), *written[1:]])


def _saved_s(some: Sequence[Seen], all_seen: Sequence[Seen]) -> float:
    cost_s = {name: took_s for seen in all_seen for name, took_s in seen.encoded_s.items()}
    return sum(cost_s[name] for seen in some for name in seen.answered)


def _hit_us(some: Sequence[Seen]) -> float:
    return median([us for seen in some for us in seen.hit_us] or [0.0])
