"""All gauges of the daemon: reads all sources for each sample, in a thread.

Owns: the reading and closing of sources, and the pause before an absent source is tried again. Does not own the list of
sources (`registry`), nor the choice between their readings (`chain`).

Invariant: a failure of one source, of any kind, never ends a sample.
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
from .library import one_line
from .offers import Opening
from .owners import OwnersSource
from .reading import GaugeAbsent, GaugeFailed, Result, Source

if TYPE_CHECKING:
    # The settings read the registry.
    from ..config import governing

ABSENT_S: Final = 60.0
"""Seconds after which an absent source is tried again: a driver may be loaded after the daemon has started."""


class Gauges:
    """The sources of all tiers, each tier with its chain.

    Args:
        tiers: the sources of each tier, best first. `report` passes readings to the OwnersSource among them.
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
        """Reads every source. Blocks; one thread at a time may call it. Raises nothing.

        After `close` it reads nothing and returns no gauges.
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
        """Takes a client's reading of `device`. May be called from any thread. Ignored if no source uses it."""
        if self._owners is None:
            return
        taken = device != HOST_GAUGE and self._owners.report(device, used_bytes, total_bytes, now)
        if not taken and not self._refusal_told:
            self._refusal_told = True
            self._log.warning(
                "a client's reading of its device is ignored; further ones are not logged",
                device=device,
                why="not a device's name, or more than devices_max devices",
            )

    def close(self) -> None:
        """Releases the resources of the sources. Never waits: a sample under way releases them when it ends."""
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
            # An error in a source is a failure of that source, logged like any other. Sampling goes on.
            return GaugeFailed(one_line(error))


def open_gauges(config: governing.GaugesSection, devices_max: int, log: Any, *, root: Path = Path("/")) -> Gauges:
    """The configured gauges. No source is opened or loaded before the first sample.

    Args:
        config: validated: if it selects the source `file`, it names a file.
        devices_max: the most devices whose readings are taken from clients.
        root: the folder that has /sys, for AMD's cards.
    """
    given = Opening(root, config.file, devices_max)
    tiers = ((Tier.HOST, config.host), (Tier.DEVICE, config.device))
    return Gauges([(tier, registry.opened(tier, choice, given)) for tier, choice in tiers], log)
