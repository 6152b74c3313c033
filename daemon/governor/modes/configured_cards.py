"""Cards that the configuration names, and that no gauge has: most likely a name is mistyped.

Nothing is missing while only the owners of tensors report devices: such a device has a gauge once an owner has opened
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ....ipc.messages.modes import Tier
from ..forms.limits import GovernorLimits
from .tiers import Gauge

OWNERS_SOURCE: Final = "owners"
"""The source of a gauge that is known only from the reports of tensor owners."""


def missing_cards(limits: GovernorLimits, gauges: Iterable[Gauge]) -> list[dict[str, str]]:
    """The setting and the name of each card that no gauge has, by the last readings."""
    devices = [gauge.sample for gauge in gauges if gauge.sample.tier is Tier.DEVICE]
    if all(sample.source == OWNERS_SOURCE for sample in devices):
        return []
    named = [("device.baseline", name) for name, _ in limits.baselines if name]
    named += [("neighbours.servers", place.card) for place in limits.neighbours if place.card]
    known = {sample.gauge for sample in devices}
    return [{"setting": setting, "card": name} for setting, name in dict.fromkeys(named) if name not in known]
