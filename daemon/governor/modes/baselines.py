"""Baselines: how much of a device is held by plan, so that its modes are about the rest.

Owns the declared baselines (of the configuration, of clients) and the learned ones. Does not own what
a mode is (policy.modes), nor the readings.

What is declared counts: the configuration's declaration, or the sum of the clients', if that is more. Without a
declaration, what is not an entry and has stayed within STEADY_SHARE of the device for `baseline_learn_s` is learned. A
learned baseline falls with the first reading that shows less, and rises only once the use has been steady again.

Invariant: a baseline is at most BASELINE_SHARE_MAX of its device: modes about a smaller rest would change with every
allocation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from ....errors import LimitReached
from ....ipc.messages import control as messages
from ....ipc.messages.modes import Tier
from ..forms.events import Sample
from ..forms.limits import GovernorLimits

BASELINE_SHARE_MAX: Final = 0.95
STEADY_SHARE: Final = 0.02
GAP_S: Final = 60.0
"""Readings further apart than this show nothing of the time between them."""

BaselineSource = Literal["", "declared", "learned"]


class Baseline(NamedTuple):
    """A device's baseline and where it is from; 0 and "" without one."""

    size_bytes: int
    source: BaselineSource


@dataclass(slots=True)
class _Steady:
    """The least and the most use since `since`. `learned`: the baseline."""

    since: float
    last: float
    low: int
    high: int
    learned: int = 0


class Baselines:
    """The baselines of all devices by name."""

    def __init__(self, limits: GovernorLimits) -> None:
        self._limits = limits
        self._clients: dict[int, dict[str, int]] = {}
        self._steady: dict[str, _Steady] = {}

    def declare(self, client: int, message: messages.DeclareBaseline) -> None:
        """Sets what a client declares for a device. 0 bytes: removes the former declaration.

        Raises:
            LimitReached: too many devices have a declaration; the text names devices_max.
        """
        declared = self._clients.get(client, {})
        if message.size_bytes and message.device not in declared and len(declared) >= self._limits.devices_max:
            raise LimitReached(
                f"baselines of {len(declared)} devices are declared, and {self._limits.devices_max} may be (a fixed "
                "limit): "
                f"that of {message.device!r} is one too many"
            )
        if message.size_bytes:
            declared[message.device] = message.size_bytes
        else:
            declared.pop(message.device, None)
        self._clients[client] = declared
        if not declared:
            del self._clients[client]

    def client_left(self, client: int) -> None:
        """Ends the client's declarations."""
        self._clients.pop(client, None)

    def read(self, device: str, others_bytes: int, total_bytes: int, now: float) -> None:
        """Takes a new reading. `others_bytes`: what is used and is no entry."""
        learn_s = self._limits.baseline_learn_s
        if learn_s is None:
            self._steady.clear()
            return
        steady = self._steady.get(device)
        if steady is None:
            self._steady[device] = _Steady(now, now, others_bytes, others_bytes)
            return
        steady.low, steady.high = min(steady.low, others_bytes), max(steady.high, others_bytes)
        if steady.high - steady.low > STEADY_SHARE * total_bytes or now - steady.last > GAP_S:
            steady.since, steady.low, steady.high = now, others_bytes, others_bytes
        steady.last = now
        steady.learned = min(steady.learned, others_bytes)
        if now - steady.since >= learn_s:
            steady.learned = steady.low

    def keep_only(self, known: Callable[[str], bool]) -> None:
        """Forgets what was learned of devices without a gauge."""
        self._steady = {device: steady for device, steady in self._steady.items() if known(device)}

    def of(self, sample: Sample) -> Baseline:
        """The baseline in force for a reading. The host has none."""
        if sample.tier is Tier.HOST:
            return Baseline(0, "")
        device = sample.gauge
        configured = dict(self._limits.baselines)
        planned = configured.get(device, configured.get("", 0))
        clients = sum(declared.get(device, 0) for declared in self._clients.values())
        most = int(BASELINE_SHARE_MAX * sample.total_bytes)
        if declared := max(planned, clients):
            return Baseline(min(declared, most), "declared")
        steady = self._steady.get(device)
        learned = 0 if steady is None or self._limits.baseline_learn_s is None else min(steady.learned, most)
        return Baseline(learned, "learned" if learned else "")

    def check_invariants(self, clients: set[int]) -> None:
        """Asserts what the module's docstring promises."""
        assert self._clients.keys() <= clients, "a declaration of a client that left"
        assert all(self._clients.values())
        assert all(0 <= steady.learned <= steady.high for steady in self._steady.values())
        assert all(steady.low <= steady.high and steady.since <= steady.last for steady in self._steady.values())
