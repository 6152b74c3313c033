"""The names of tiers, and of the modes that a tier can be in. When a mode is entered or left, and what follows, is the
daemon's governor's."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Tier(StrEnum):
    """The memory that holds a payload: a client's VRAM, or the ring in host memory.

    Example:
        >>> tensord.Tier.DEVICE == "device", tensord.Tier.HOST == "host"
        (True, True)
    """

    DEVICE = "device"
    HOST = "host"


class Mode(StrEnum):
    """The mode of a tier: five levels of fullness, and `WORKFLOW_AWARE`.

    `WORKFLOW_AWARE` stands for the levels normal and pressure while a step graph is registered.

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
"""The five levels, from the emptiest to the fullest."""

HOST_GAUGE: Final = "host"
"""The name of the host tier's gauge. Every other gauge has the name of its device."""
