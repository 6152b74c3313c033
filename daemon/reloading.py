"""One reload of the configuration: what it changes, or why it is refused.

Owns: the check of a new configuration against the running daemon, the verdict and its log lines. Does not own: the
configuration, nor what the parts of the daemon do with it.

Invariant: a reload applies all changed settings that need no restart, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import BadConfiguration
from .config.config import Config
from .config.limits import governor_limits, store_limits
from .forms.limits import StoreLimits
from .governor.forms.limits import GovernorLimits
from .process.logs import logger

_log = logger("tensord")


def reload(
    running: Config, load: Callable[[], Config], ring_bytes: int, max_entries: int
) -> tuple[dict[str, Any], tuple[Config, StoreLimits, GovernorLimits] | None]:
    """Loads the configuration anew and checks all parts of it. Changes nothing.

    Returns:
        The verdict, as the answer to ConfigQuery has it beside the reload's number and time: `refused`, why nothing
        changes, empty if it is accepted; the settings `applied`; those `waiting`, which need a restart. And the
        configuration to take over, with the limits that follow from it; None if it is refused.
    """
    try:
        found = running.reloaded(load())
        # All checks come before the first change: a refused reload changes nothing.
        stores = store_limits(found.config, ring_bytes, max_entries)
        accepted = found.config, stores, governor_limits(found.config)
    except BadConfiguration as error:
        return {"refused": str(error), "applied": [], "waiting": []}, None
    return {"refused": "", "applied": found.applied, "waiting": found.waiting}, accepted


def log(number: int, verdict: dict[str, Any]) -> str:
    """Writes the verdict of reload `number`, from 1, to the log. Returns one line for `systemctl status`."""
    if verdict["refused"]:
        _log.error("reload failed; the configuration is unchanged", number=number, why=verdict["refused"])
        return f"reload {number} refused, the configuration is unchanged: {verdict['refused']}"
    applied, waiting = verdict["applied"], verdict["waiting"]
    for change in applied:
        _log.info("setting changed", **change)
    for change in waiting:
        _log.warning("setting needs a restart", **change)
    _log.info("reload applied", number=number, changed=len(applied), waiting=len(waiting))
    restart = f", {len(waiting)} need a restart" if waiting else ""
    return f"reload {number} applied: {len(applied)} settings changed{restart}"
