"""The unevictable spans of the ring, and the limit that a put exceeds even if every evictable entry is evicted.

Unevictable are: spans that puts are being copied into, spans pinned by message, spans that the last scan found pinned,
the ancestors of a pinned entry, and those of an entry whose put is in flight.

The pins of the last scan are a hint only. Whether the span of a victim may be reused is decided by a scan that begins
after the victim was unpublished. The hint prevents an entry in use from being hidden and republished again and again.

Owns the sets of ancestors and the survey (`survey`). Does not own pins, spans or budgets, and chooses no victims. The
unevictable spans are walked only to find out what keeps a put out: at once if few are pinned, otherwise in slices.

Invariant: `may_go` is true of published entries only.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from itertools import chain

from .entries import EntryState, SpanEntry
from .need import Need
from .pins import Pins
from .span_table import SpanTable
from .survey import SURVEYED_MAX, Survey


class Unevictable:
    """The unevictable spans of `memory`."""

    def __init__(self, memory: SpanTable, pins: Pins) -> None:
        self._memory = memory
        self._pins = pins
        self._pinned_ancestor_set: set[SpanEntry] = set()
        self._pinned_ancestors_for: tuple[AbstractSet[int], int] | None = None
        self._awaited_set: set[SpanEntry] = set()
        self._awaited_for = -1
        self._survey: Survey | None = None
        self._survey_for: tuple[AbstractSet[int], int] | None = None

    def advance_survey(self) -> bool:
        """Examines the next slice of the unevictable spans. True once `obstacle` may be called; otherwise call
        again."""
        if self._few_pinned:
            return True
        now_for = self._memory.last_pinned, self._pins.changes
        known_for = self._survey_for
        is_fresh = known_for is not None and known_for[0] is now_for[0] and known_for[1] == now_for[1]
        if self._survey is None or (self._survey.done and not is_fresh):
            self._survey, self._survey_for = self._begin_survey(), now_for
        # A finished survey is used even if it is outdated by then, because pins change all the time.
        self._survey.advance()
        return self._survey.done

    @property
    def is_known(self) -> bool:
        """Whether `obstacle` may be called. Its answer may rest on an outdated survey."""
        return self._few_pinned or (self._survey is not None and self._survey.done)

    def obstacle(self, need: Need) -> str | None:
        """The name of the limit or resource that makes a put impossible even if every evictable entry is evicted. None
        if there is none, or if the survey is not finished (`advance_survey`)."""
        memory = self._memory
        budget = memory.budget
        survey = self.survey()
        if survey is None:
            return None
        filling = [*memory.filling]
        if survey.entries + len(filling) + need.entries > budget.max_entries:
            return "max_entries"
        kept_bytes = survey.size_bytes + memory.filling_bytes
        if kept_bytes + need.span_bytes > budget.max_bytes:
            return "max_bytes"
        if need.key is not None and kept_bytes + need.span_bytes > budget.put_bytes_max:
            return "resident_bytes_max"
        tokens = survey.tokens + sum(entry.tokens for entry in filling)
        if budget.max_tokens is not None and tokens + need.tokens > budget.max_tokens:
            return "max_tokens"
        if need.key is not None:
            if not len(survey.gaps(need.span_bytes, filling)[0]):
                return "ring"
            if not any(entry is None or not self._is_unevictable(entry) for entry in self.bucket(need.key)):
                return "index bucket"
        return None

    def size_bytes(self) -> int:
        """Bytes of the unevictable spans, as far as they are known."""
        survey = self.survey()
        return self._memory.filling_bytes + (survey.size_bytes if survey is not None else 0)

    def _is_unevictable(self, entry: SpanEntry) -> bool:
        if entry.state is EntryState.FILLING or entry.span_id in self._memory.last_pinned:
            return True
        if entry.state is not EntryState.LIVE:
            return False
        if self._pins.holds(entry.span_id):
            return True
        if not self._memory.sequences.in_use:
            return False
        return entry in self._awaited_ancestors() or entry in self._pinned_ancestors()

    def may_go(self, entry: SpanEntry) -> bool:
        """Whether the entry is evictable: published, and neither it nor a descendant is known to be in use."""
        return entry.state is EntryState.LIVE and not self._is_unevictable(entry)

    def _pinned_ancestors(self) -> set[SpanEntry]:
        """The ancestors of pinned entries."""
        memory = self._memory
        kept_for = (memory.last_pinned, self._pins.changes)
        if kept_for != self._pinned_ancestors_for:
            pinned = map(memory.spans.find, (*memory.last_pinned, *self._pins.spans()))
            self._pinned_ancestor_set = memory.sequences.ancestors(pinned)
        # Keep the same set object even if an equal one came: comparing an object with itself is free.
        self._pinned_ancestors_for = kept_for
        return self._pinned_ancestor_set

    def _awaited_ancestors(self) -> set[SpanEntry]:
        """The parents of entries whose puts are in flight, and the ancestors of these parents."""
        sequences = self._memory.sequences
        if sequences.changes != self._awaited_for:
            awaited = {entry for entry in map(self._memory.entries.find, sequences.followed) if entry is not None}
            self._awaited_set, self._awaited_for = awaited | sequences.ancestors(awaited), sequences.changes
        return self._awaited_set

    @property
    def _few_pinned(self) -> bool:
        """Whether so few spans are pinned that the survey is made anew at each call."""
        return len(self._memory.last_pinned) + len(self._pins) <= SURVEYED_MAX

    def survey(self) -> Survey | None:
        """The survey of unevictable spans, without those that puts are being copied into. None if it is not
        finished."""
        if not self._few_pinned:
            return self._survey if self.is_known else None
        survey = self._begin_survey()
        while not survey.done:
            survey.advance()
        return survey

    def _begin_survey(self) -> Survey:
        """Walks the pins and the blocks that lead to them, not all entries."""
        memory, pinned, pins = self._memory, self._memory.last_pinned, self._pins
        besides = (number for number in list(pins.spans()) if number not in pinned)
        blocks = (each for each in self._awaited_ancestors() | self._pinned_ancestors() if not self._is_pinned(each))
        spans = chain(map(memory.spans.find, chain(pinned, besides)), blocks)
        return Survey(spans, self._is_unevictable, memory.ring.capacity_bytes)

    def _is_pinned(self, entry: SpanEntry) -> bool:
        return entry.span_id in self._memory.last_pinned or self._pins.holds(entry.span_id)

    def bucket(self, key: bytes) -> list[SpanEntry | None]:
        """The spans in the slots in which `key` may be placed; None for a free slot."""
        index = self._memory.index
        return [self._memory.spans.find(index.read(slot).span_id) for slot in index.slots_for(key)]
