"""The bars of the hot path: most are ratios to peers measured in the same run. A bar is never asserted.

Owns: the bars, and the comparison of a measured figure with its bar. Does not own: the measurements.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple

from peers import Op
from peers.harness import SIZES, Row, table

K64, M1, M16 = SIZES["64K"], SIZES["1M"], SIZES["16M"]


Cell = tuple[str, Op, int]
"""One cell of the table of rows: a peer, an operation and a payload size."""


class Bar(NamedTuple):
    """Tensord's `op` on `bytes` is at most `limit` times `against`. Without it, at most `limit` microseconds."""

    name: str
    op: Op
    bytes: int
    limit: float
    against: Cell | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure that is no row, such as the start of a daemon, in its own unit. None: the run did not measure it."""

    name: str
    value: float | None
    limit: float
    unit: str


_GET = "get → numpy, a hit with everything on"
_COPY_1M: Final[Cell] = ("copy", "copy", M1)
_COPY_16M: Final[Cell] = ("copy", "copy", M16)
_LMDB_PUTS: Final[Cell] = ("lmdb", "put_sustained", K64)

BARS: Final = (
    Bar(f"{_GET}, 64 KB, against LMDB", "get", K64, 1.6, ("lmdb", "get", K64)),
    Bar(f"{_GET}, 1 MB, against LMDB", "get", M1, 0.7, ("lmdb", "get", M1)),
    Bar(f"{_GET}, 16 MB, against LMDB", "get", M16, 0.06, ("lmdb", "get", M16)),
    Bar(f"{_GET}, 16 MB, against 64 KB", "get", M16, 1.6, ("tensord", "get", K64)),
    Bar("get, 64 KB, against vLLM's store", "get", K64, 0.2, ("vllm", "get", K64)),
    Bar("get and read every byte, 1 MB, against LMDB", "get_consume", M1, 1.3, ("lmdb", "get_consume", M1)),
    Bar("get_many(2048), µs a key", "get_many_key", K64, 0.2),
    Bar("put until the call returns, 1 MB, against copyto", "put_return", M1, 1.3, _COPY_1M),
    Bar("put until the call returns, 16 MB, against copyto", "put_return", M16, 1.15, _COPY_16M),
    Bar("put, sustained, 64 KB, against LMDB", "put_sustained", K64, 2.5, _LMDB_PUTS),
    Bar("put, sustained, 1 MB, against copyto", "put_sustained", M1, 1.8, _COPY_1M),
    Bar("put, sustained, 16 MB, against copyto", "put_sustained", M16, 1.3, _COPY_16M),
    Bar("put until visible, 16 MB, against copyto", "put_visible", M16, 1.2, _COPY_16M),
    Bar("put until visible, 1 MB, against LMDB", "put_visible", M1, 1.6, ("lmdb", "put_visible", M1)),
    Bar("put_many of 64 KB, a piece, against LMDB's puts back to back", "put_many", K64, 2.0, _LMDB_PUTS),
    Bar("put until visible, 64 KB, against Redis", "put_visible", K64, 1.2, ("redis", "put_visible", K64)),
)


def figures(rows: Iterable[Row], bars: Sequence[Bar] = BARS) -> list[Figure]:
    """The medians of these rows beside the bars; a ratio where the bar is a ratio."""
    medians: Mapping[Cell, float] = {(r.peer, r.op, r.bytes): r.median_us for r in rows}
    found = []
    for bar in bars:
        value = medians.get(("tensord", bar.op, bar.bytes))
        if bar.against is not None and value is not None:
            base = medians.get(bar.against)
            value = value / base if base else None
        found.append(Figure(bar.name, value, bar.limit, "×" if bar.against else "µs"))
    return found


def figures_table(found: Sequence[Figure]) -> str:
    """A table of all figures and their bars."""
    lines = []
    for figure in found:
        value = figure.value
        measured = "not measured" if value is None else f"{value:.3g} {figure.unit}"
        verdict = "" if value is None else "reached" if value <= figure.limit else "missed"
        lines.append([figure.name, measured, f"≤ {figure.limit:g} {figure.unit}", verdict])
    return table(["figure", "measured", "bar", ""], lines)


def save_figures(path: Path, found: Sequence[Figure]) -> None:
    """Writes the figures as JSON, a list of objects with the fields of Figure."""
    path.write_text(json.dumps([asdict(figure) for figure in found], indent=2) + "\n")
