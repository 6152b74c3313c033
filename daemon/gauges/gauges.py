"""All gauges of the daemon: their sources, read together, in a thread.

Owns: that one which fails, however it fails, ends no sample. Does not own
which sources there are (`registry`), nor whose reading counts (`chain`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...ipc.modes import HOST_GAUGE, Tier
from ..core.governor.events import Sample, Sampled
from . import registry
from .chain import Chain
from .library import told
from .offers import Opening
from .owners import OwnersSource
from .reading import GaugeAbsent, GaugeFailed, Result, Source

if TYPE_CHECKING:
    # The settings read the registry.
    from ..config import governing

ABSENT_S: Final = 60.0
"""What is not there is looked for again after so long: a driver may be loaded after the daemon has begun."""


class Gauges:
    """Every tier's sources, and the chain that goes with them.

    Args:
        tiers: the sources of each, best first. An OwnersSource among them is who `report` reports to.
        log: a structlog logger.
    """

    def __init__(self, tiers: Sequence[tuple[Tier, Sequence[Source]]], log: Any) -> None:
        self._tiers = [(Chain(tier, [each.name for each in sources]), sources) for tier, sources in tiers]
        self._owners = next((each for _, sources in tiers for each in sources if isinstance(each, OwnersSource)), None)
        self._absent: dict[str, tuple[float, GaugeAbsent]] = {}
        self._refusal_told = False
        self._log = log
        self._busy = threading.Lock()
        self._closed = False

    def sample(self, began_at: float) -> Sampled:
        """Reads every source; blocks, and is called by one thread at a time. Raises nothing.

        After `close`: no gauges, and nothing is read.
        """
        samples: list[Sample] = []
        with self._busy:
            for chain, sources in self._tiers if not self._closed else ():
                taken, lines = chain.take({each.name: self._read(each, began_at) for each in sources}, began_at)
                samples += taken
                for line in lines:
                    getattr(self._log, line.level)(line.event, **line.fields)
        if self._closed:
            self.close()
        return Sampled(tuple(samples))

    def report(self, device: str, used_bytes: int, total_bytes: int, now: float) -> None:
        """What an owner of tensors on `device` sees of it; from any thread. Ignored where no source is made of it."""
        if self._owners is None:
            return
        taken = device != HOST_GAUGE and self._owners.report(device, used_bytes, total_bytes, now)
        if not taken and not self._refusal_told:
            self._refusal_told = True
            self._log.warning("report refused", device=device, why="not a device's name, or one more than devices_max")

    def close(self) -> None:
        """Gives back what the sources hold; never waits. A sample under way gives it back when it ends."""
        self._closed = True
        if self._busy.acquire(blocking=False):
            try:
                for _, sources in self._tiers:
                    for source in sources:
                        source.close()
            finally:
                self._busy.release()

    def _read(self, source: Source, now: float) -> Result | GaugeFailed:
        absent = self._absent.get(source.name)
        if absent is not None and now - absent[0] < ABSENT_S:
            return absent[1]
        self._absent.pop(source.name, None)
        try:
            return source.read(now)
        except GaugeAbsent as failed:
            self._absent[source.name] = now, failed
            return failed
        except GaugeFailed as failed:
            return failed
        except Exception as error:
            # A mistake in a source is that source's failure, told like any other: sampling goes on.
            return GaugeFailed(told(error))


def open_gauges(config: governing.GaugesSection, devices_max: int, log: Any, *, root: Path = Path("/")) -> Gauges:
    """The gauges that a configuration wants. Nothing is opened, or loaded, before the first sample.

    Args:
        config: validated: where it says `file`, it names one.
        devices_max: of so many devices at once owners are listened to.
        root: the folder in which /sys is, for the cards of AMD.
    """
    given = Opening(root, config.file, devices_max)
    tiers = ((Tier.HOST, config.host), (Tier.DEVICE, config.device))
    return Gauges([(tier, registry.opened(tier, choice, given)) for tier, choice in tiers], log)
