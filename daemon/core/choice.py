"""The search for room for one put: the outcome of a round, and the progress over several rounds.

Owns these two records. Does not own the search (`room`) nor its timing (`reclaim`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .entries import SpanEntry


@dataclass(slots=True)
class Cursor:
    """The progress of one need's search from round to round.

    `begun`: the remaining entries of a window that is evicted in several rounds. `window_at`: the offset of the window
    that the next round extends. `skip`: the number of entries at the cold end that were examined in vain. `plans`:
    rounds with moves. `exchanged`: an exchange of pages was requested. `scanned`: a scan has found the pins since the
    search began. `spare_bytes`: bytes evicted so that more entries can move.
    """

    begun: list[SpanEntry] = field(default_factory=list)
    window_at: int | None = None
    skip: int = 0
    exchanged: bool = False
    scanned: bool = False
    plans: int = 0
    spare_bytes: int = 0


@dataclass(slots=True)
class Choice:
    """The outcome of one round: victims with the reason for each, and moves, each with the offset of its hole.
    `searching`: nothing was found among the entries examined so far; call again.

    `exchange`: without victims, a stretch [low, high) of the ring in which only withdrawn extents are in the way.
    """

    victims: dict[SpanEntry, str] = field(default_factory=dict)
    moves: list[tuple[SpanEntry, int]] = field(default_factory=list)
    searching: bool = False
    exchange: tuple[int, int] | None = None

    def warmest_needed(self, size_bytes: int) -> SpanEntry:
        """The last of the victims that a put of `size_bytes` itself needs. Those after it make room for later puts."""
        for entry in self.victims:
            size_bytes -= entry.span_bytes
            if size_bytes <= 0:
                break
        return entry
