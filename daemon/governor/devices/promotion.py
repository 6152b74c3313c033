"""Remembers offloaded entries, and which of them to ask back before they are needed.

Owns the recently offloaded entries by device and key, and what to ask for next. Does not own orders.

Invariants: at most `remembered_max` entries are remembered; the oldest of a device are forgotten first. A remembered
entry is not registered, and its client is connected. An entry that was asked for counts as used until it is registered,
or `retry_s` have passed: a registered one counts as every new entry (reservations).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ....ipc.messages.modes import Mode
from ..forms.limits import GovernorLimits
from .circumstances import Circumstances
from .passes import Outlook
from .record import DeviceRecord, HeldEntry, Sums
from .room import has_room

_PROMOTING: Final = (Mode.RELAXED, Mode.WORKFLOW_AWARE)


@dataclass(slots=True, eq=False)
class OffloadedEntry:
    """The description of an offloaded entry. `client`: its owner, which is asked to bring it back; `asked_until`: until
    then it is not asked again."""

    key: bytes
    client: int
    size_bytes: int
    tokens: int
    agent: str
    cost_ms: float
    uses: int
    asked_until: float = 0.0


class Promotions:
    """The entries offloaded from each open device, the oldest first, and those of them that were asked for."""

    def __init__(self, limits: GovernorLimits, outlook: Outlook) -> None:
        self._most = limits.remembered_max
        self._outlook = outlook
        self._remembered: dict[str, dict[bytes, OffloadedEntry]] = {}
        self._asked: dict[str, list[OffloadedEntry]] = {}

    def __len__(self) -> int:
        """The number of remembered entries."""
        return sum(map(len, self._remembered.values()))

    def opened(self, device: str) -> None:
        """Entries of this device may be asked for."""
        self._remembered[device] = {}
        self._asked[device] = []

    def closed(self, device: str) -> None:
        """The device has no owner left to ask."""
        del self._remembered[device], self._asked[device]

    def offloaded(self, device: str, entries: Iterable[HeldEntry]) -> None:
        """Remembers entries that their owners have offloaded."""
        known = self._remembered[device]
        for entry in entries:
            about = entry.size_bytes, entry.tokens, entry.agent, entry.cost_ms, entry.uses
            known[entry.key] = OffloadedEntry(entry.key, entry.owner.client, *about)
        for key in list(known)[: max(0, len(self) - self._most)]:
            del known[key]

    def registered(self, device: str, key: bytes) -> OffloadedEntry | None:
        """Records that a key is registered, asked for or not. Returns and forgets its description."""
        return self._remembered[device].pop(key, None)

    def released(self, device: str, client: int, keys: Sequence[bytes]) -> None:
        """Forgets keys that their client deleted, so that they are not asked for."""
        known = self._remembered[device]
        for key in keys:
            if key in known and known[key].client == client:
                del known[key]

    def client_left(self, client: int) -> None:
        """Forgets the client's entries."""
        for device, known in self._remembered.items():
            self._remembered[device] = {key: entry for key, entry in known.items() if entry.client != client}

    def agents(self, device: str) -> set[str]:
        """The agents of a device's remembered entries."""
        return {entry.agent for entry in self._remembered[device].values()}

    def take(
        self, device: DeviceRecord, circumstances: Circumstances, limits: GovernorLimits, now: float
    ) -> dict[int, list[OffloadedEntry]]:
        """The entries to ask for now, by client, the nearest agents' first: as many as keep the device under its
        pressure threshold and its budgets, at most `keys_per_request_max`."""
        wanted: dict[int, list[OffloadedEntry]] = {}
        if circumstances.mode not in _PROMOTING or not self._remembered[device.name]:
            return wanted
        coming = self._coming(device.name, now)
        more = Sums(len(coming), sum(e.size_bytes for e in coming), sum(e.tokens for e in coming))
        bytes_max = circumstances.at(limits.thresholds.pressure)
        used_bytes = circumstances.used_bytes + circumstances.reserved_bytes
        for entry in self._up_next(device, limits.lookahead_steps, now)[: limits.keys_per_request_max]:
            more = more.plus(Sums(1, entry.size_bytes, entry.tokens))
            if used_bytes + more.bytes >= bytes_max or not has_room(device, more, limits):
                break
            wanted.setdefault(entry.client, []).append(entry)
            entry.asked_until = now + limits.retry_s
            coming.append(entry)
        self._asked[device.name] = coming
        return wanted

    def coming_bytes(self, device: str, now: float) -> int:
        """Bytes of the entries that were asked for and are not registered yet."""
        return sum(entry.size_bytes for entry in self._coming(device, now))

    def check_invariants(self, devices: dict[str, DeviceRecord]) -> None:
        """Asserts what the module's docstring promises."""
        assert len(self) <= self._most
        assert self._remembered.keys() == self._asked.keys() == devices.keys()
        for name, known in self._remembered.items():
            assert not known.keys() & devices[name].entries.keys(), "an entry is remembered and registered"

    def _coming(self, device: str, now: float) -> list[OffloadedEntry]:
        known = self._remembered.get(device, {})
        return [e for e in self._asked.get(device, ()) if e.asked_until > now and known.get(e.key) is e]

    def _up_next(self, device: DeviceRecord, lookahead: int, now: float) -> list[OffloadedEntry]:
        """The entries that may be asked for now, of clients that respond. The nearest agent's come first, and of each
        agent the oldest."""
        turns = {agent: turn for turn, agent in enumerate(self._outlook.up_next(lookahead))}
        there: Collection[int] = {owner.client for owner in device.owners.values() if not owner.unresponsive}
        found = [
            entry
            for entry in self._remembered[device.name].values()
            if entry.agent in turns and entry.asked_until <= now and entry.client in there
        ]
        return sorted(found, key=lambda entry: turns[entry.agent])
