"""A store that answers more slowly than computing takes: clients do not ask it, and it is probed from time to time.

Owns: whether the store is too slow for what was sought last, and when it is probed. Does not own the average of its
answers (`speed`), nor the probes (`fetches`). Probes come as for a store that fails (`breaker`): without them the
average would stay as it is, since nobody asks.
"""

from __future__ import annotations

from .breaker import Breaker


class Slowness:
    """Of one store."""

    def __init__(self) -> None:
        self._cost_s = 0.0
        self._breaker = Breaker()

    @property
    def why(self) -> str:
        """Why the store is not asked; empty if it is."""
        return self._breaker.why

    def declined(self, answer_s: float, cost_s: float, now: float) -> bool:
        """The store was not asked, since its answers take so long and computing takes `cost_s`. Returns whether a probe
        is to begin now."""
        self._cost_s = cost_s
        if self._breaker.closed:
            self._breaker.failed(_why(answer_s, cost_s), now, refused=True, probe=False)
        self._breaker.why = _why(answer_s, cost_s)
        if not self._breaker.may_probe(now):
            return False
        self._breaker.probe()
        return True

    def answered(self, answer_s: float, now: float, *, probe: bool) -> None:
        """The store has answered; `answer_s`: a probe's own time, or the average."""
        if self._breaker.closed:
            return
        if answer_s < self._cost_s:
            self._breaker.succeeded()
        elif probe:
            self._breaker.failed("", now, refused=False, probe=True)
            self._breaker.why = _why(answer_s, self._cost_s)

    def failed(self, now: float) -> None:
        """A probe has ended with an error."""
        self._breaker.failed("", now, refused=False, probe=True)


def _why(answer_s: float, cost_s: float) -> str:
    return f"answers took {answer_s:.3g} s, computing takes {cost_s:.3g} s"
