"""The learned policy's record of each stored span, in columns: about 60 bytes for each span, without Python objects.

Owns: the columns, and the slot of each span. Does not own the meaning of the fields (`hazard`).

The table from span to slot is split into PARTS tables, because growing one table of a quarter of a million items takes
10 ms. Free slots are reused.

Invariants: each known span has one slot, and its `used_at` is unique. The columns of a free slot are 0.
"""

from __future__ import annotations

from array import array
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .ghosts import Ghost

PARTS: Final = 64

Slots = npt.NDArray[np.int64]


class Records:
    """The columns, indexed by slot."""

    def __init__(self) -> None:
        self.span = array("Q")
        self.digest = array("Q")
        self.used_at = array("d")
        """The time of the last use by the policy's clock. No two are equal."""
        self.put_at = array("q")
        """The bytes put into the store up to this span's put; 0 for a span that never belongs to the window."""
        self.size = array("q")
        self.owner = array("I")
        self.agent = array("H")
        self.uses = array("H")
        self.traits = array("B")
        self.weight = array("f")
        self.may_go = array("B")
        self._columns: tuple[array[Any], ...] = (
            self.span,
            self.digest,
            self.used_at,
            self.put_at,
            self.size,
            self.owner,
            self.agent,
            self.uses,
            self.traits,
            self.weight,
            self.may_go,
        )
        self._slots: list[dict[int, int]] = [{} for _ in range(PARTS)]
        self._free = array("Q")

    def __len__(self) -> int:
        return len(self.span) - len(self._free)

    def slot(self, span_id: int) -> int:
        """The slot of a known span."""
        return self._slots[span_id % PARTS][span_id]

    def find(self, span_id: int) -> int | None:
        """The slot of a span; None if the span is unknown."""
        return self._slots[span_id % PARTS].get(span_id)

    def add(self, span_id: int) -> int:
        """A slot for a new span. The caller fills its columns."""
        part = self._slots[span_id % PARTS]
        assert span_id not in part, span_id
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self.span)
            for column in self._columns:
                column.append(0)
        part[span_id] = slot
        self.span[slot] = span_id
        return slot

    def remove(self, span_id: int) -> None:
        """Forgets a span and frees its slot."""
        slot = self._slots[span_id % PARTS].pop(span_id)
        for column in self._columns:
            column[slot] = 0
        self._free.append(slot)

    def remembered(self, slot: int) -> Ghost:
        """The part of the record that is remembered after an eviction."""
        return Ghost(self.used_at[slot], self.uses[slot], self.traits[slot], self.agent[slot], self.weight[slot])

    def set_remembered(self, slot: int, of: Ghost) -> None:
        """Sets the part of the record that `remembered` returns."""
        self.used_at[slot], self.uses[slot], self.traits[slot], self.agent[slot], self.weight[slot] = of

    def column(self, column: array[Any], slots: Slots) -> npt.NDArray[Any]:
        """The values of a column at some slots."""
        return np.frombuffer(column, column.typecode).take(slots)

    def slots(self) -> Slots:
        """The slots of all known spans, in ascending order."""
        return np.flatnonzero(np.frombuffer(self.span, np.uint64)) if self.span else np.empty(0, np.int64)

    def check_invariants(self) -> None:
        """Asserts the invariants of the module's docstring."""
        known = {span: slot for part in self._slots for span, slot in part.items()}
        assert all(self.span[slot] == span for span, slot in known.items())
        assert set(self._free) | set(known.values()) == set(range(len(self.span)))
        assert len(self) == len(known)
        used = [self.used_at[slot] for slot in known.values()]
        assert len(set(used)) == len(used)
        assert not any(self.may_go[slot] for slot in self._free)
