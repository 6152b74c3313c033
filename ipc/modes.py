"""The words of pressure: tiers, and the modes that a tier can be in.

Owns: their names and their order. Does not own when one is entered or left, nor what follows from it: that is the
daemon's policy.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Tier(StrEnum):
    """Where a payload lives: a client's VRAM, or the ring.

    Example:
        >>> tensord.Tier.DEVICE == "device", tensord.Tier.HOST == "host"
        (True, True)
    """

    DEVICE = "device"
    HOST = "host"


class Mode(StrEnum):
    """How full a tier is, in five levels; `WORKFLOW_AWARE`: normal or pressure, with a step graph to go by.

    Example:
        >>> tensord.Mode.CRITICAL == "critical"
        True
    """

    RELAXED = "relaxed"
    NORMAL = "normal"
    PRESSURE = "pressure"
    CRITICAL = "critical"
    EMERGENCY = "emergency"
    WORKFLOW_AWARE = "workflow_aware"


LEVELS: Final = (Mode.RELAXED, Mode.NORMAL, Mode.PRESSURE, Mode.CRITICAL, Mode.EMERGENCY)
"""The five levels, from empty to full."""

HOST_GAUGE: Final = "host"
"""The host tier's gauge. Every other gauge is a device's, under the device's name."""
