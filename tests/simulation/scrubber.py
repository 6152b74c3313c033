"""The look at stored entries of a simulated daemon: sums of those that have none, and checks of a former daemon's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensord.daemon.forms.events import FoundCorrupt

if TYPE_CHECKING:
    from .daemon import Daemon
    from .world import World


class Scrubber:
    """Looks at one entry at a time."""

    def __init__(self, world: World, daemon: Daemon) -> None:
        self.world = world
        self.daemon = daemon
        self.memory = daemon.memory
        self.unsummed: list[int] = []
        """Slots of entries without a checksum."""
        self.scrubbed: tuple[int, int, int] | None = None

    def scrub(self) -> None:
        """Looks at an entry of a former daemon, or at one without a checksum. Records the result a step later, if the
        slot still holds the same span."""
        index = self.memory.index
        if self.scrubbed is not None:
            number, span_id, checksum = self.scrubbed
            self.scrubbed = None
            slot = index.read(number)
            if slot.published and slot.span_id == span_id:
                self.memory.write_checksum(slot.offset, checksum)
                index.mark(number, unverified=False)
            return
        due = [slot for slot in index.slots() if slot.published and slot.unverified]
        if self.unsummed:
            unsummed = index.read(self.unsummed.pop())
            due += [unsummed] if unsummed.published else []
        if due:
            slot = self.world.chance.choice(due)
            sound, checksum = self.memory.summed(slot)
            if not sound:
                assert self.world.damaged, "an entry differs from the stored one"
                self.daemon.do(FoundCorrupt(slot.span_id))
                return
            self.scrubbed = slot.number, slot.span_id, checksum

    def take_checksums(self) -> None:
        """Gives every entry a checksum, as a daemon does that has been idle for long enough."""
        for slot in self.memory.index.slots():
            if slot.published:
                sound, checksum = self.memory.summed(slot)
                assert sound, "an entry differs from the stored one"
                self.memory.write_checksum(slot.offset, checksum)
