"""The bars of the hot path: most are ratios to peers measured in the same run. A bar is never asserted.

Owns: the bars, and the comparison of a measured figure with its bar. Does not own: the measurements.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from peers import Op
from peers.harness import SIZES, Row, table

K64, M1, M16 = SIZES["64K"], SIZES["1M"], SIZES["16M"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table of rows: a peer, an operation and a payload size."""

    peer: str
    op: Op
    bytes: int


@dataclass(frozen=True, slots=True)
class Bar:
    """`of` is at most `limit` times `against`. Without `against`, `of` is at most `limit` microseconds."""

    name: str
    of: Cell
    limit: float
    against: Cell | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure that is no row, such as the start of a daemon, in its own unit. None: the run did not measure it."""

    name: str
    value: float | None
    limit: float
    unit: str


def _get(peer: str, value_bytes: int) -> Cell:
    return Cell(peer, "get", value_bytes)


_GET = "get → numpy, a hit with everything on"
_COPY_1M, _COPY_16M = Cell("copy", "copy", M1), Cell("copy", "copy", M16)

BARS: Final = (
    Bar(f"{_GET}, 64 KB, against LMDB", _get("tensord", K64), 1.6, _get("lmdb", K64)),
    Bar(f"{_GET}, 1 MB, against LMDB", _get("tensord", M1), 0.7, _get("lmdb", M1)),
    Bar(f"{_GET}, 16 MB, against LMDB", _get("tensord", M16), 0.06, _get("lmdb", M16)),
    Bar(f"{_GET}, 16 MB, against 64 KB", _get("tensord", M16), 1.6, _get("tensord", K64)),
    Bar("get, 64 KB, against vLLM's store", _get("tensord", K64), 0.2, _get("vllm", K64)),
    Bar(
        "get and read every byte, 1 MB, against LMDB",
        Cell("tensord", "get_consume", M1),
        1.3,
        Cell("lmdb", "get_consume", M1),
    ),
    Bar("get_many(2048), µs a key", Cell("tensord", "get_many_key", K64), 0.2),
    Bar(
        "put until the call returns, 1 MB, against copyto",
        Cell("tensord", "put_return", M1),
        1.3,
        _COPY_1M,
    ),
    Bar(
        "put until the call returns, 16 MB, against copyto",
        Cell("tensord", "put_return", M16),
        1.15,
        _COPY_16M,
    ),
    Bar(
        "put, sustained, 64 KB, against LMDB",
        Cell("tensord", "put_sustained", K64),
        2.5,
        Cell("lmdb", "put_sustained", K64),
    ),
    Bar("put, sustained, 1 MB, against copyto", Cell("tensord", "put_sustained", M1), 1.8, _COPY_1M),
    Bar("put, sustained, 16 MB, against copyto", Cell("tensord", "put_sustained", M16), 1.3, _COPY_16M),
    Bar("put until visible, 16 MB, against copyto", Cell("tensord", "put_visible", M16), 1.2, _COPY_16M),
    Bar(
        "put until visible, 1 MB, against LMDB",
        Cell("tensord", "put_visible", M1),
        1.6,
        Cell("lmdb", "put_visible", M1),
    ),
    Bar(
        "put_many of 64 KB, a piece, against LMDB's puts back to back",
        Cell("tensord", "put_many", K64),
        2.0,
        Cell("lmdb", "put_sustained", K64),
    ),
    Bar(
        "put until visible, 64 KB, against Redis",
        Cell("tensord", "put_visible", K64),
        1.2,
        Cell("redis", "put_visible", K64),
    ),
)


def figures(rows: Iterable[Row], bars: Sequence[Bar] = BARS) -> list[Figure]:
    """The medians of these rows beside the bars; a ratio where the bar is a ratio."""
    medians: Mapping[Cell, float] = {Cell(r.peer, r.op, r.bytes): r.median_us for r in rows}
    found = []
    for bar in bars:
        value = medians.get(bar.of)
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
