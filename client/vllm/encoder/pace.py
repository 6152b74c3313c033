"""How fast this engine encodes, and for how long it therefore waits for another engine's output.

Owns: the measured time of a row, and the comparison of both engines' times. Does not own: the waiting (scheduler.py).
Only the step's thread uses it.
Invariants: without a measured time nothing is estimated: an engine then waits up to `wait_s_max`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from .inputs import Asking

WAIT_S_LEAST: Final = 0.02
WAIT_FACTOR: Final = 3
"""An engine waits for another engine up to this multiple of the time that the other engine expected to take."""
SOONER: Final = 0.8
"""An engine does not wait if it would have encoded the input itself within this share of the other's remaining time."""


class Pace:
    """The times of one engine.

    Args:
        requests: the engine's requests, oldest first.
        wait_s_max: limit of seconds to wait for another engine.
        step_requests, step_rows: the most requests, and the most rows of encoder outputs, in one step.
    """

    def __init__(self, requests: Iterable[Asking], wait_s_max: float, step_requests: int, step_rows: int) -> None:
        self._requests = requests
        self._wait_s_max = wait_s_max
        self._step_requests = step_requests
        self._step_rows = step_rows
        self.row_s: float | None = None
        """Seconds for a row of an encoder output; None: not measured yet."""
        self._rows = 0
        self._rows_wanted: int | None = None
        self._busy_until = 0.0

    def learn(self, rows: int, encode_s: float) -> None:
        """Takes in what a worker measured."""
        row_s = encode_s / rows
        self.row_s = row_s if self.row_s is None else 0.75 * self.row_s + 0.25 * row_s

    def allocate(self, rows: int) -> None:
        """Adds rows to the step that is being made. This engine encodes them."""
        self._rows += rows

    def end_step(self) -> int:
        """Ends the step that is being made. Returns the rows that it encodes."""
        rows, self._rows = self._rows, 0
        self._rows_wanted = None
        if rows and self.row_s is not None:
            self._busy_until = max(time.monotonic(), self._busy_until) + rows * self.row_s
        return rows

    def own_s(self, rows: int) -> float:
        """Seconds until these rows, claimed or to claim, would be stored, if encoded in one step with all rows that may
        be claimed for that step. A step's outputs are stored when the step ends. 0 if unknown."""
        if self.row_s is None:
            return 0.0
        return max(0.0, self._busy_until - time.monotonic()) + max(rows, self._rows_of_step()) * self.row_s

    def is_sooner(self, expected_at: float, now: float) -> bool:
        """Whether this engine would have encoded all inputs that it wants before the other engine has stored this
        one. `expected_at`: when the other engine expects that, by time.monotonic; 0 if unknown."""
        if self.row_s is None or not expected_at:
            return False
        return self._all_s(now, self.row_s) < SOONER * (expected_at - now)

    def patience_s(self, expected_at: float, since: float) -> float:
        """Seconds to wait for the other engine: a multiple of the time that it expected, or else of the time that all
        work wanted here would take this engine. At most `wait_s_max`."""
        if expected_at:
            expected_s = expected_at - since
        elif self.row_s is not None:
            expected_s = self._all_s(since, self.row_s)
        else:
            return self._wait_s_max
        return min(max(WAIT_FACTOR * expected_s, WAIT_S_LEAST), self._wait_s_max)

    def _rows_of_step(self) -> int:
        """Rows that the next step may encode: those of the oldest requests, without rows that another engine
        encodes."""
        requests = rows = 0
        for asking in self._requests:
            of_request = sum(
                found.rows
                for found in asking.inputs.values()
                if found.lease is None and (found.wanted is None or found.wanted.state != "waiting")
            )
            requests += of_request > 0
            rows += of_request
            if requests >= self._step_requests or rows >= self._step_rows:
                break
        return min(rows, self._step_rows)

    def _all_s(self, now: float, row_s: float) -> float:
        """Seconds until all inputs that are wanted here and not found would be stored, if this engine encoded them."""
        if self._rows_wanted is None:
            inputs = (found for asking in self._requests for found in asking.inputs.values())
            self._rows_wanted = sum(found.rows for found in inputs if not found.lease)
        return max(0.0, self._busy_until - now) + self._rows_wanted * row_s
