"""Entries that were offloaded, remembered so that they are promoted before they are needed.

Owns: what was offloaded lately, by device, key and agent, which of it was asked for, what to ask for next. Does not
own: orders.

Invariants: at most `remembered_max` entries, the oldest of a device forgotten first; none that is registered; one that
was asked for and is not in the gauge yet counts as used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from ....ipc.modes import Mode
from .device_record import Device
from .device_room import has_room
from .limits import GovernorLimits
from .passes import Circumstances, Outlook
from .ranking import Amounts

_PROMOTING: Final = (Mode.RELAXED, Mode.WORKFLOW_AWARE)


class Trace(NamedTuple):
    """What an entry was when it left. `client`: who has it in mind, as far as it is still there."""

    client: int
    size_bytes: int
    tokens: int
    agent: str
    uses: int


Plain: TypeAlias = tuple[int, int, int, str, int]
"""A Trace."""
_AGENT: Final = 3


class Remembered:
    """Offloaded entries, a device's oldest first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        # Plain tuples: the garbage collector need not look at tens of thousands of them again and again.
        self._traces: dict[str, dict[bytes, Plain]] = {}
        self._by_agent: dict[tuple[str, str], dict[bytes, None]] = {}

    def __len__(self) -> int:
        return self._count

    def change_most(self, most: int) -> None:
        """Forgets what is too much now."""
        self._most = most
        for device in list(self._traces):
            self._forget_oldest(device)

    def add(self, device: str, traces: Iterable[tuple[bytes, Plain]]) -> None:
        """Entries were offloaded, none of which is remembered."""
        known = self._traces.setdefault(device, {})
        before = len(known)
        for key, trace in traces:
            known[key] = trace
            if trace[_AGENT]:
                keys = self._by_agent.get((device, trace[_AGENT]))
                if keys is None:
                    keys = self._by_agent[device, trace[_AGENT]] = {}
                keys[key] = None
        self._count += len(known) - before
        self._forget_oldest(device)

    def get(self, device: str, key: bytes) -> Trace | None:
        """What is remembered of a key."""
        trace = self._traces.get(device, {}).get(key)
        return None if trace is None else Trace(*trace)

    def pop(self, device: str, key: bytes) -> Trace | None:
        """The same, and it is forgotten."""
        known = self._traces.get(device)
        trace = known.pop(key, None) if known else None
        if known is None or trace is None:
            return None
        self._count -= 1
        if not known:
            del self._traces[device]
        if trace[_AGENT]:
            keys = self._by_agent[device, trace[_AGENT]]
            del keys[key]
            if not keys:
                del self._by_agent[device, trace[_AGENT]]
        return Trace(*trace)

    def of_agent(self, device: str, agent: str) -> Iterator[tuple[bytes, Trace]]:
        """An agent's, oldest first."""
        for key in self._by_agent.get((device, agent), ()):
            yield key, Trace(*self._traces[device][key])

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        assert self._count == sum(map(len, self._traces.values())) <= self._most
        by_agent: dict[tuple[str, str], set[bytes]] = {}
        for device, traces in self._traces.items():
            for key, trace in traces.items():
                if trace[_AGENT]:
                    by_agent.setdefault((device, trace[_AGENT]), set()).add(key)
        assert by_agent == {name: set(keys) for name, keys in self._by_agent.items()}

    def _forget_oldest(self, device: str) -> None:
        """The device that there is too much for now forgets its own."""
        for key in list(islice(self._traces[device], max(0, self._count - self._most))):
            self.pop(device, key)


@dataclass(slots=True)
class _Asked:
    trace: Trace
    until: float
    registered_at: float | None = None


class Promotions:
    """What was offloaded from each open device, and what of it is on its way back."""

    def __init__(self, limits: GovernorLimits, outlook: Outlook) -> None:
        self.remembered = Remembered(limits.remembered_max)
        self._outlook = outlook
        self._asked: dict[str, dict[bytes, _Asked]] = {}

    def opened(self, device: str) -> None:
        """Entries of this device may be asked for."""
        self._asked[device] = {}

    def closed(self, device: str) -> None:
        """Nobody is there any more to ask."""
        del self._asked[device]

    def registered(self, device: str, key: bytes, now: float) -> Trace | None:
        """A key is there, asked for or not. What was remembered of it, which is forgotten."""
        asked = self._asked[device].get(key)
        if asked is not None:
            asked.registered_at = now
        return self.remembered.pop(device, key)

    def released(self, device: str, client: int, keys: Sequence[bytes]) -> None:
        """A client deleted these: it is not to get them again."""
        for key in keys:
            trace = self.remembered.get(device, key)
            if trace is not None and trace.client == client:
                self.remembered.pop(device, key)

    def take(
        self, device: Device, circumstances: Circumstances, limits: GovernorLimits, now: float
    ) -> dict[int, list[tuple[bytes, Trace]]]:
        """What to ask of whom now, nearest agents' first: as much as keeps the device under its pressure threshold and
        its budgets, `keys_per_request_max` entries at most.
        """
        asked = self._asked[device.name] = {
            key: asked
            for key, asked in self._asked[device.name].items()
            if (asked.until > now if asked.registered_at is None else asked.registered_at >= circumstances.began_at)
        }
        wanted: dict[int, list[tuple[bytes, Trace]]] = {}
        if circumstances.mode not in _PROMOTING or not len(self.remembered):
            return wanted
        bytes_max = limits.thresholds.pressure * circumstances.total_bytes
        after_bytes = circumstances.used_bytes + circumstances.reserved_bytes
        after_bytes += sum(one.trace.size_bytes for one in asked.values())
        coming = [one.trace for one in asked.values() if one.registered_at is None]
        more = Amounts(sum(t.size_bytes for t in coming), sum(t.tokens for t in coming), len(coming))
        for key, trace in self._next(device, limits.lookahead_steps):
            if key in asked:
                continue
            after_bytes += trace.size_bytes
            more = Amounts(more.bytes + trace.size_bytes, more.tokens + trace.tokens, more.entries + 1)
            if after_bytes >= bytes_max or not has_room(device, more, limits):
                break
            wanted.setdefault(trace.client, []).append((key, trace))
            asked[key] = _Asked(trace, now + limits.retry_s)
            if sum(map(len, wanted.values())) >= limits.keys_per_request_max:
                break
        return wanted

    def check_invariants(self, devices: Collection[str]) -> None:
        """Asserts what the module's docstring promises."""
        self.remembered.check_invariants()
        assert self._asked.keys() == set(devices)

    def _next(self, device: Device, lookahead: int) -> Iterator[tuple[bytes, Trace]]:
        """Remembered entries of agents up next whose owner is there to bring them."""
        for agent in self._outlook.up_next(lookahead):
            for key, trace in self.remembered.of_agent(device.name, agent):
                owner = device.owners.get(trace.client)
                if owner is not None and not owner.unresponsive and device.table.find(key) is None:
                    yield key, trace
