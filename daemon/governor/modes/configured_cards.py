"""Cards that the configuration names, and that no gauge has: most likely a name is mistyped.

Owns: the names that are missing, and which of them were logged. Does not own the settings, nor the gauges.

Nothing is missing while only the owners of tensors report devices: such a device has a gauge once an owner has opened
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ....ipc.messages.modes import Tier
from ..forms.events import Sample
from ..forms.limits import GovernorLimits
from ..forms.outbox import GovernorOutbox

OWNERS_SOURCE: Final = "owners"
"""The source of a gauge that is known only from the reports of tensor owners."""


class ConfiguredCards:
    """`missing`: the setting and the name of each card that no gauge has, by the last readings."""

    def __init__(self, limits: GovernorLimits, outbox: GovernorOutbox) -> None:
        self.missing: tuple[tuple[str, str], ...] = ()
        self._limits = limits
        self._outbox = outbox

    def sampled(self, samples: Iterable[Sample]) -> None:
        """Takes the readings of all gauges. Logs each name once when it is found to be missing."""
        devices = [sample for sample in samples if sample.tier is Tier.DEVICE]
        known = {sample.gauge for sample in devices}
        named = [("device.baseline", name) for name, _ in self._limits.baselines if name]
        named += [("neighbours.servers", place.card) for place in self._limits.neighbours if place.card]
        if not any(sample.source != OWNERS_SOURCE for sample in devices):
            named = []
        before, self.missing = self.missing, tuple(each for each in dict.fromkeys(named) if each[1] not in known)
        for setting, name in self.missing:
            if (setting, name) not in before:
                self._outbox.log(
                    "warning", "setting names a card that is not there", setting=setting, card=name, cards=sorted(known)
                )
