"""The messages between the governor and the store about the host's memory.

Owns their fields. Does not own pressure (`governor.host`) nor the ring's pages (`residency`). Invariant: Pressed goes
from the governor to the store, HostHolds from the store to the governor; each is an effect of the sending core, and an
event of the receiving core.
"""

from __future__ import annotations

from msgspec import Struct


class Pressed(Struct, frozen=True):
    """The limits that the governor sets for the store from now on. If all fields have their defaults, there is no
    pressure.

    The governor sends it whenever a field has changed. The store answers each with HostHolds.

    Args:
        resident_bytes_max: the ring may keep this number of bytes in memory; None: all its bytes.
        refuse: puts are refused.
        reason: why puts are refused, for the text of the refusal.
    """

    resident_bytes_max: int | None = None
    refuse: bool = False
    reason: str = ""


class HostHolds(Struct, frozen=True):
    """How much of the ring is in memory.

    Args:
        resident_bytes: the bytes of the ring that are in memory now.
        wanted_bytes: the bytes that would be in memory without pressure.
        settled: the store has done all that the last Pressed asked for, as far as that is possible.
    """

    resident_bytes: int
    wanted_bytes: int
    settled: bool
