"""All gauges of the daemon: begins the readings of all sources, and takes the answers.

Owns: a thread for each source (`source_thread`), and how long closing waits for them. Does not own the list of sources
(`sources.registry`), nor the choice between their readings (`chain`), nor the times of samples (the pressure actor).

Invariants: nothing but `close` waits, and that for CLOSE_S at most. A source that fails or hangs changes no gauge of
another source.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...ipc.messages.modes import HOST_GAUGE, Tier
from ..governor.forms.events import Sample, Sampled, SourceState
from .chain import STALE_AFTER, STALE_S, Chain
from .reading import Source
from .source_thread import SourceThread
from .sources import registry
from .sources.owners import OwnersSource

if TYPE_CHECKING:
    # The settings read the registry.
    from ..config import sections

CLOSE_S: Final = 1.0
"""Seconds that closing waits for sources. A source that hangs is left behind: its thread ends with the process."""


class Gauges:
    """The sources of all tiers, each tier with its chain.

    Args:
        tiers: the sources of each tier, best first. `report` passes readings to the OwnersSource among them.
        log: a structlog logger.
    """

    def __init__(self, tiers: Sequence[tuple[Tier, Sequence[Source]]], log: Any) -> None:
        self.answered: Callable[[], object] = lambda: None
        """Called after each answer of a source, in the thread of that source. Must not block."""
        self._tiers = [
            (
                Chain(tier, [each.name for each in sources]),
                [SourceThread(each, lambda: self.answered()) for each in sources],
            )
            for tier, sources in tiers
        ]
        self._threads = [each for _, threads in self._tiers for each in threads]
        self._owners = next((each for _, sources in tiers for each in sources if isinstance(each, OwnersSource)), None)
        self._began_at = 0.0
        self._refusal_told = False
        self._log = log

    def begin(self, now: float) -> None:
        """Begins a reading of every source that has none under way."""
        self._began_at = now
        for each in self._threads:
            each.begin(now)

    @property
    def awaited(self) -> int:
        """How many readings of the last `begin` are under way."""
        return sum(each.began_at == self._began_at for each in self._threads)

    @property
    def under_way(self) -> int:
        """How many readings are under way, those of sources that hang included."""
        return sum(each.began_at is not None for each in self._threads)

    @property
    def has_answers(self) -> bool:
        """Whether a source has answered since `take`."""
        return any(each.has_answer for each in self._threads)

    def take(self, now: float, every_s: float = 0.0) -> Sampled:
        """The last readings of all gauges, with the answers that have come. `every_s`: the interval of samples."""
        stale_s = max(STALE_S, STALE_AFTER * every_s)
        samples: list[Sample] = []
        states: list[SourceState] = []
        for chain, threads in self._tiers:
            # Whether a source hangs is asked first: an answer that comes meanwhile ends it.
            hanging = {each.name: since for each in threads if (since := each.hanging_since(now)) is not None}
            answers = {each.name: answer for each in threads if (answer := each.take()) is not None}
            taken, lines = chain.take(answers, hanging, now, stale_s)
            samples += taken
            states += chain.states()
            for line in lines:
                getattr(self._log, line.level)(line.event, **line.fields)
        return Sampled(tuple(samples), tuple(states))

    def report(self, device: str, used_bytes: int, total_bytes: int, read_at: float) -> None:
        """Takes a client's reading of `device`, which began at `read_at`. May be called from any thread.

        Ignored if no source uses it.
        """
        if self._owners is None:
            return
        taken = device != HOST_GAUGE and self._owners.report(device, used_bytes, total_bytes, read_at)
        if not taken and not self._refusal_told:
            self._refusal_told = True
            self._log.warning(
                "a client's reading of its device is ignored; further ones are not logged",
                device=device,
                why="not a device's name, or more devices than are known at most, a fixed limit",
            )

    def close(self) -> None:
        """Has every source closed in its thread, and waits for them, for CLOSE_S in all. Nothing is read after this."""
        for each in self._threads:
            each.stop()
        until = time.monotonic() + CLOSE_S
        left = [each.name for each in self._threads if not each.join(max(0.0, until - time.monotonic()))]
        if left:
            self._log.warning("gauge sources hang, and are left behind", sources=left)


def open_gauges(config: sections.GaugesSection, devices_max: int, log: Any, *, root: Path = Path("/")) -> Gauges:
    """The configured gauges. No source is opened or loaded before the first reading.

    Args:
        config: validated: if it selects the source `file`, it names a file.
        devices_max: the most devices whose readings are taken from clients.
        root: the folder that has /sys and /dev.
    """
    tiers = ((Tier.HOST, config.host), (Tier.DEVICE, config.device))
    return Gauges(
        [(tier, registry.opened(tier, choice, root, config.file, devices_max)) for tier, choice in tiers], log
    )
