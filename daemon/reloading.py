"""One reload of the configuration: what it changes, or why it is refused, as a verdict.

Owns: the check of a new configuration against the running daemon, the verdict and its log lines. Does not own: the
configuration, nor what the parts of the daemon do with it.

Invariant: a reload applies all changed settings that need no restart, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import BadConfiguration
from .config.config import Config
from .config.limits import governor_limits, store_limits
from .forms.limits import StoreLimits
from .governor.forms.limits import GovernorLimits
from .process.logs import logger

_log = logger("tensord")


@dataclass(frozen=True, slots=True)
class Accepted:
    """A configuration that the daemon takes over, and the limits that follow from it."""

    config: Config
    stores: StoreLimits
    governors: GovernorLimits


@dataclass(frozen=True, slots=True)
class ReloadVerdict:
    """The result of reload number `number`, from 1. `refused`: why nothing has changed; empty if it was accepted.
    `waiting`: settings that differ and need a restart."""

    number: int
    at_unix_s: float
    refused: str = ""
    applied: list[dict[str, str]] = field(default_factory=list)
    waiting: list[dict[str, str]] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """The part of the answer to ConfigQuery about the last reload."""
        return asdict(self)

    @property
    def text(self) -> str:
        """One line, for `systemctl status`."""
        if self.refused:
            return f"reload {self.number} refused, the configuration is unchanged: {self.refused}"
        waiting = f", {len(self.waiting)} need a restart" if self.waiting else ""
        return f"reload {self.number} applied: {len(self.applied)} settings changed{waiting}"

    def log(self) -> None:
        """Writes the verdict to the log, with a line for each setting."""
        if self.refused:
            _log.error("reload failed; the configuration is unchanged", number=self.number, why=self.refused)
            return
        for change in self.applied:
            _log.info("setting changed", **change)
        for change in self.waiting:
            _log.warning("setting needs a restart", **change)
        _log.info("reload applied", number=self.number, changed=len(self.applied), waiting=len(self.waiting))


def reload(
    running: Config, load: Callable[[], Config], ring_bytes: int, max_entries: int, number: int, unix_s: float
) -> tuple[ReloadVerdict, Accepted | None]:
    """Loads the configuration anew and checks all parts of it. Changes nothing."""
    try:
        found = running.reloaded(load())
        # All checks come before the first change: a refused reload changes nothing.
        stores = store_limits(found.config, ring_bytes, max_entries)
        accepted = Accepted(found.config, stores, governor_limits(found.config))
    except BadConfiguration as error:
        return ReloadVerdict(number, unix_s, refused=str(error)), None
    return ReloadVerdict(number, unix_s, "", found.applied, found.waiting), accepted
