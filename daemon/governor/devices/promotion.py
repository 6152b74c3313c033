"""Remembers offloaded entries, and asks their clients to promote them before they are needed.

Owns the recently offloaded entries by device, key and agent, those that were asked for, and what to ask for next. Does
not own orders.

Invariants: at most `remembered_max` entries are remembered; the oldest of a device are forgotten first. A remembered
entry is not registered, and its client is connected. An entry that was asked for counts as used until it is registered:
then it counts as every new entry (reservations).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from ....ipc.messages.modes import Mode
from ..forms.limits import GovernorLimits
from .passes import Circumstances, Outlook
from .ranking import Amounts, at_once, first
from .record import DeviceRecord
from .room import has_room
from .table import FREE, Rows, Table

_PROMOTING: Final = (Mode.RELAXED, Mode.WORKFLOW_AWARE)
_FORGET_SHARE: Final = 64


class OffloadedEntry(NamedTuple):
    """The description of an offloaded entry. `client`: its owner, which is asked to bring it back."""

    client: int
    size_bytes: int
    tokens: int
    agent: str
    uses: int


class Remembered:
    """Offloaded entries of each device, in columns like registered ones; `owner` is the client's number here.

    If there are too many, a device's oldest entries are forgotten, and a few more than needed, so that the next
    addition does not forget again.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tables: dict[str, Table] = {}

    def __len__(self) -> int:
        return sum(map(len, self._tables.values()))

    def add(self, device: str, client: int, table: Table, rows: Rows, now: float) -> None:
        """Remembers rows of the device's table that the client has offloaded."""
        if len(rows):
            self._tables.setdefault(device, Table()).copy(table, rows, client, now)
            self._forget_oldest(device)

    def find(self, device: str, key: bytes) -> OffloadedEntry | None:
        """The description of a remembered key; None if it is not remembered."""
        table = self._tables.get(device)
        row = table.find(key) if table else None
        return None if table is None or row is None else _described(table, row)

    def forget(self, device: str, key: bytes) -> None:
        """Forgets a remembered key."""
        table = self._tables[device]
        row = table.find(key)
        assert row is not None
        self._remove(device, np.array([row]))

    def up_next(
        self, device: DeviceRecord, agents: Sequence[str], now: float, most: int
    ) -> list[tuple[bytes, OffloadedEntry]]:
        """Up to `most` entries of these agents that may be asked for now, of clients that respond. The first agent's
        come first, and of each agent the oldest."""
        table = self._tables.get(device.name)
        numbers = [number for number in map(table.agents.number, agents) if number] if table else []
        if table is None or not numbers:
            return []
        turn = np.full(len(table.agents.names), len(numbers))
        turn[numbers[::-1]] = np.arange(len(numbers))[::-1]
        turns = turn[table.agent[: table.end]]
        mask = (turns < len(numbers)) & (table.state[: table.end] != FREE) & (table.not_before[: table.end] <= now)
        there = np.array([owner.client for owner in device.owners.values() if not owner.unresponsive], np.int32)
        rows = np.flatnonzero(mask)
        rows = rows[(table.owner[rows, np.newaxis] == there).any(axis=1)]
        turns, serials = turns[rows], table.serial[rows]
        rank = (turns.__getitem__, serials.__getitem__)
        chosen = at_once(first(rank, np.ones(len(rows), np.int64), len(rows), most))
        chosen = chosen[np.lexsort((serials[chosen], turns[chosen]))]
        keys: list[bytes] = table.keys[rows[chosen]].tolist()
        return [(key, _described(table, row)) for key, row in zip(keys, rows[chosen].tolist(), strict=True)]

    def agents(self, device: str) -> AbstractSet[str]:
        """The agents of a device's remembered entries."""
        table = self._tables.get(device)
        return table.agents.known() if table else set()

    def client_left(self, client: int) -> None:
        """Forgets the client's entries."""
        for device, table in list(self._tables.items()):
            self._remove(device, table.where(owner=client))

    def put_off(self, device: str, keys: Sequence[bytes], until: float) -> None:
        """These remembered keys were asked for, and are not asked for again before `until`."""
        table = self._tables[device]
        table.not_before[table.rows(keys)] = until

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        assert len(self) <= self._most
        for table in self._tables.values():
            table.check_invariants()
            assert len(table), "an empty table was kept"

    def _forget_oldest(self, device: str) -> None:
        """Forgets the oldest entries of this device until the limit holds."""
        excess = len(self) - self._most
        if excess <= 0:
            return
        table = self._tables[device]
        live = np.flatnonzero(table.state[: table.end] != FREE)
        count = min(excess + self._most // _FORGET_SHARE, len(live))
        self._remove(device, live[np.argpartition(table.serial[live], count - 1)[:count]])

    def _remove(self, device: str, rows: Rows) -> None:
        table = self._tables[device]
        table.remove(rows)
        if not len(table):
            del self._tables[device]


def _described(table: Table, row: int) -> OffloadedEntry:
    return OffloadedEntry(
        int(table.owner[row]),
        int(table.size_bytes[row]),
        int(table.tokens[row]),
        table.agents.names[table.agent[row]],
        int(table.uses[row]),
    )


@dataclass(slots=True)
class _Asked:
    trace: OffloadedEntry
    until: float


class Promotions:
    """The entries offloaded from each open device, and those that were asked for."""

    def __init__(self, limits: GovernorLimits, outlook: Outlook) -> None:
        self.remembered = Remembered(limits.remembered_max)
        self._outlook = outlook
        self._asked: dict[str, dict[bytes, _Asked]] = {}

    def opened(self, device: str) -> None:
        """Entries of this device may be asked for."""
        self._asked[device] = {}

    def closed(self, device: str) -> None:
        """The device has no owner left to ask."""
        del self._asked[device]

    def registered(self, device: str, key: bytes) -> OffloadedEntry | None:
        """Records that a key is registered, asked for or not. Returns and forgets its description."""
        self._asked[device].pop(key, None)
        trace = self.remembered.find(device, key)
        if trace is not None:
            self.remembered.forget(device, key)
        return trace

    def released(self, device: str, client: int, keys: Sequence[bytes]) -> None:
        """Forgets keys that their client deleted, so that they are not asked for."""
        for key in keys:
            trace = self.remembered.find(device, key)
            if trace is not None and trace.client == client:
                self.remembered.forget(device, key)

    def take(
        self, device: DeviceRecord, circumstances: Circumstances, limits: GovernorLimits, now: float
    ) -> dict[int, list[tuple[bytes, OffloadedEntry]]]:
        """The entries to ask for now, by client, the nearest agents' first: as many as keep the device under its
        pressure threshold and its budgets, at most `keys_per_request_max`."""
        asked = self._asked[device.name] = {
            key: asked for key, asked in self._asked[device.name].items() if asked.until > now
        }
        wanted: dict[int, list[tuple[bytes, OffloadedEntry]]] = {}
        if circumstances.mode not in _PROMOTING or not len(self.remembered):
            return wanted
        bytes_max = circumstances.at(limits.thresholds.pressure)
        after_bytes = circumstances.used_bytes + circumstances.reserved_bytes
        coming = [one.trace for one in asked.values()]
        after_bytes += sum(trace.size_bytes for trace in coming)
        more = Amounts(sum(t.size_bytes for t in coming), sum(t.tokens for t in coming), len(coming))
        agents = self._outlook.up_next(limits.lookahead_steps)
        for key, trace in self.remembered.up_next(device, agents, now, limits.keys_per_request_max):
            after_bytes += trace.size_bytes
            more = Amounts(more.bytes + trace.size_bytes, more.tokens + trace.tokens, more.entries + 1)
            if after_bytes >= bytes_max or not has_room(device, more, limits):
                break
            wanted.setdefault(trace.client, []).append((key, trace))
            asked[key] = _Asked(trace, now + limits.retry_s)
        for entries in wanted.values():
            self.remembered.put_off(device.name, [key for key, _ in entries], now + limits.retry_s)
        return wanted

    def coming_bytes(self, device: str, now: float) -> int:
        """Bytes of the entries that were asked for and are not registered yet."""
        return sum(one.trace.size_bytes for one in self._asked.get(device, {}).values() if one.until > now)

    def check_invariants(self, devices: Collection[str]) -> None:
        """Asserts what the module's docstring promises."""
        self.remembered.check_invariants()
        assert self._asked.keys() == set(devices)
