"""Decides the size of the ring and the number of entries when a daemon finds the memory of a former daemon.

Owns: the decision. Pure: its inputs are the superblock and the configured sizes. Does not own the memory.

A derived size was computed from the free memory when the ring was created. If each start computed it again, a restart
alone could evict entries, so the size in the superblock is kept. A configured size is applied as far as possible: a
ring grows in place; it shrinks by returning pages, while its segment keeps its length; an index cannot grow.

Invariant: the number of entries never exceeds the capacity of the existing index.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from ...shm.ring.layout import Superblock, aligned


@dataclass(frozen=True, slots=True)
class ConfiguredSizes:
    """The sizes in the configuration. `derived`: those of "ring_bytes" and "max_entries" that are not configured."""

    ring_bytes: int
    max_entries: int
    namespaces_max: int = 1024
    derived: frozenset[str] = frozenset()

    def configured(self, name: str) -> int | None:
        """A configured size; None if it is derived."""
        return None if name in self.derived else int(getattr(self, name))


def resolved_sizes(former: Superblock, asked: ConfiguredSizes) -> tuple[Superblock, list[str]]:
    """The superblock with the sizes from now on, and notices for the operator."""
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
            f"max_entries is {wanted}, but the existing index has room for {room}: {room} is used. To get a larger "
            "index, stop the daemon, drop all entries with `tensorctl purge`, and start it again"
        )
    ring_bytes = max(former.ring_bytes, limit_bytes)
    return replace(former, ring_bytes=ring_bytes, limit_bytes=limit_bytes, max_entries=min(wanted, room)), notices
