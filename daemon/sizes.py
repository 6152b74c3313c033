"""How large the ring may be and how many entries there may be, when a daemon finds memory of a former one.

Owns: the decision. Pure: takes what stands in the superblock and what the configuration asks for.

A derived size was computed from the memory that was free when the ring was made. Computed anew at each start it would
evict entries because of the restart alone, so the superblock's size holds. A configured size holds as far as possible:
a ring grows in place, and shrinks by giving pages back while its segment stays as long as it was; an index cannot grow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..shm.layout import Superblock, aligned


@dataclass(frozen=True, slots=True)
class ConfiguredSizes:
    """What the configuration asks for. `derived`: those of "ring_bytes" and "max_entries" that nobody has set."""

    ring_bytes: int
    max_entries: int
    namespaces_max: int = 1024
    derived: frozenset[str] = frozenset()

    def configured(self, name: str) -> int | None:
        """A size that somebody has set; None where it is derived."""
        return None if name in self.derived else int(getattr(self, name))


def settled(former: Superblock, asked: ConfiguredSizes) -> tuple[Superblock, list[str]]:
    """The superblock with the sizes that hold from now on, and what an operator should know of them."""
    limit_bytes = aligned(asked.configured("ring_bytes") or min(former.limit_bytes, former.ring_bytes))
    wanted = asked.configured("max_entries")
    if wanted is None:
        wanted = former.max_entries
        if limit_bytes > former.limit_bytes:
            wanted = max(wanted, asked.max_entries)
    room = former.geometry.entries_max
    notices = []
    if wanted > room:
        notices.append(
            f"max_entries is to be {wanted}, and the index was made with room for {room}: {room} hold. "
            "`tensorctl purge` while the daemon is stopped drops every entry, and the next daemon makes a larger index"
        )
    ring_bytes = max(former.ring_bytes, limit_bytes)
    return replace(former, ring_bytes=ring_bytes, limit_bytes=limit_bytes, max_entries=min(wanted, room)), notices
