"""Namespaces, owners and agents by small numbers, as the columns have them, and what the former have in the ring.

Owns: the numbers of namespaces (by the tag that a key begins with), of uids and of agents, and the sums of entries.
Does not own: generations, nor the limits that the sums are compared with, nor what policies make of agents.

Invariants: the number of a namespace is given to another one only while it has no entries. The sums are those of the
rows in use. A number stands for one agent, as long as fewer than AGENTS_MAX are known; later ones have number 0. 0 is
no agent, and 1 is never given out (daemon/replacement).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...errors import LimitReached
from ...shm.lanes.records import agent_number

UIDS_MAX: Final = 1 << 16
"""A column has 16 bits for each."""
AGENTS_MAX: Final = 1 << 16


class Tenants:
    """All namespaces and owners of one store."""

    def __init__(self) -> None:
        self.number_of: dict[bytes, int] = {}
        self.tags: list[bytes] = []
        self._empty: set[int] = set()
        """Numbers of namespaces without entries, once they have had some."""
        self.entries: list[int] = []
        """Entries, by the number of their namespace."""
        self.bytes: list[int] = []
        self.invalidated: set[bytes] = set()
        """Tags of namespaces that were invalidated once: only their keys may be past."""
        self.owner_of: dict[int, int] = {}
        self.uids: list[int] = []
        self.owned_bytes: list[int] = []
        """Bytes of the ring by owner: of entries, of grants, and of what waits for a scan."""
        self.owned_entries: list[int] = []
        self.owned_tokens: list[int] = []
        self.total_entries = 0
        self.total_tokens = 0

    def add(self, tag: bytes) -> int:
        """The number of a namespace, which is new or known. The caller counts an entry in it next."""
        number = self.number_of.get(tag)
        if number is not None:
            return number
        while self._empty:
            number = self._empty.pop()
            if not self.entries[number]:
                del self.number_of[self.tags[number]]
                self.number_of[tag], self.tags[number] = number, tag
                return number
        number = self.number_of[tag] = len(self.tags)
        self.tags.append(tag)
        self.entries.append(0)
        self.bytes.append(0)
        return number

    @property
    def namespaces(self) -> int:
        """The namespaces that have entries."""
        return len(self.tags) - sum(not self.entries[number] for number in self._empty)

    def counted(self) -> None:
        """The entries of all namespaces are counted: those without one may go."""
        self._empty = {number for number, entries in enumerate(self.entries) if not entries}

    def owner(self, uid: int) -> int:
        """The number of a uid, which is new or known."""
        number = self.owner_of.get(uid)
        if number is None:
            if len(self.uids) == UIDS_MAX:
                raise LimitReached(f"{UIDS_MAX} uids have used this daemon since it started: restart it")
            number = self.owner_of[uid] = len(self.uids)
            self.uids.append(uid)
            self.owned_bytes.append(0)
            self.owned_entries.append(0)
            self.owned_tokens.append(0)
        return number

    def stored(self, owner: int, entries: int, tokens: int) -> None:
        """Entries were stored in bytes that the owner has."""
        self.owned_entries[owner] += entries
        self.owned_tokens[owner] += tokens
        self.total_entries += entries
        self.total_tokens += tokens

    def ended(self, names: Sequence[int], owners: Sequence[int], sizes: Sequence[int], tokens: Sequence[int]) -> None:
        """Entries have ended; their bytes are their owners' until they are free."""
        entries, size_of, owned, owned_tokens = self.entries, self.bytes, self.owned_entries, self.owned_tokens
        total_tokens, empty = 0, self._empty.add
        for name, owner, size, count in zip(names, owners, sizes, tokens, strict=True):
            entries[name] = left = entries[name] - 1
            size_of[name] -= size
            if not left:
                empty(name)
            owned[owner] -= 1
            owned_tokens[owner] -= count
            total_tokens += count
        self.total_entries -= len(names)
        self.total_tokens -= total_tokens


class AgentNumbers:
    """The agents of one store. `numbers`: by what records say of them; 0 is there too."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {0: 0}
        self._names: dict[int, str] = {}

    def number(self, said: int) -> int:
        """The number of an agent, which is new or known; 0 once there are AGENTS_MAX."""
        number = self.numbers.get(said)
        if number is None:
            number = len(self.numbers) + 1
            if number == AGENTS_MAX:
                return 0
            self.numbers[said] = number
        return number

    def named(self, name: str) -> int:
        """The number of the agent with this name, which is known by its name from now on."""
        number = self.number(agent_number(name))
        if number:
            self._names[number] = name
        return number

    def name(self, number: int) -> str:
        return self._names.get(number, "")
