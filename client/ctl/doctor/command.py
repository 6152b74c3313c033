"""`doctor`: collects the facts, runs every check, and prints what to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click

from tensord import __version__

from ....errors import BadConfiguration, TensordError
from ....ipc.messages.control import HealthQuery
from ....ipc.messages.schema import PROTOCOL_VERSION
from ....ipc.quantities import read_size
from ....shm.lanes import fence
from ..daemon import Daemon, pass_daemon
from ..orders import leftovers
from ..output import as_json, show
from ..show.configuration import checked
from . import checks, facts
from .finding import Finding, Level, fail, findings_text

_RING_BYTES_UNKNOWN: Final = 0


def diagnose(daemon: Daemon) -> list[Finding]:
    """All findings about this machine and the daemon behind `daemon`. Failures become findings, not exceptions."""
    found: list[Finding] = []
    status: dict[str, Any] = {}
    try:
        found.append(_socket("control", daemon.control_path, daemon.greeted))
        found.append(_socket("status", daemon.status_path, lambda: status.update(daemon.status())))
        if status:
            found += _served(daemon, status)
    except TensordError as error:
        found.append(fail("daemon", str(error), "`systemctl status tensord` and `journalctl -u tensord` say why"))
    return [*found, *_around(status)]


def _socket(what: str, path: Path, use: Callable[[], object]) -> Finding:
    error = None
    try:
        use()
    except TensordError as why:
        error = why
    without_file = facts.without_file(path) if error is not None and facts.nobody_listens(path) else ()
    return checks.socket(what, path, facts.mode(path.absolute().parent), facts.mode(path), error, without_file)


def _served(daemon: Daemon, status: dict[str, Any]) -> Iterator[Finding]:
    """What a daemon that answers tells of itself."""
    yield checks.versions(__version__, status["version"], PROTOCOL_VERSION, status["protocol"])
    yield from checks.health(daemon.ask(HealthQuery))
    yield checks.gauges(status["governor"]["gauges"], facts.hardware())


def _around(status: dict[str, Any]) -> Iterator[Finding]:
    """What a daemon needs of this machine: the one with this status, or without one, a daemon started here."""
    ring_bytes, error = status.get("ring_bytes", _RING_BYTES_UNKNOWN), None
    ignored: list[str] = []
    try:
        rows, ignored = checked()
        configured = [read_size(row["value"]) for row in rows if row["key"] == "ring_bytes"]
        ring_bytes = ring_bytes or sum(configured)
    except BadConfiguration as wrong:
        error = str(wrong)
    yield checks.configuration(error, ignored, served=bool(status))
    yield from checks.memory(facts.room(ring_bytes, status.get("ring_ready_bytes", 0), status.get("pid")))
    plain, expedited = fence.supported()
    yield checks.membarrier(plain=plain, expedited=expedited, in_use=status.get("fence"))
    uid = status.get("uid", os.geteuid())
    yield checks.logout(uid, facts.logind_configuration(), lingers=facts.lingers(uid))
    found = [left for name in leftovers.instances() if (left := leftovers.look(name)) is not None]
    yield from checks.leftover(found, status.get("instance"))


@click.command()
@as_json
@pass_daemon
@click.pass_context
def doctor(ctx: click.Context, daemon: Daemon, as_json: bool) -> None:
    """Checks the environment of a daemon, and says what to do.

    Checks sockets, the daemon behind them, versions, its health and gauges, the configuration, memory, the fence,
    deletion at logout, and memory of ended daemons. Exit code 1 if anything FAILs.
    """
    findings = diagnose(daemon)
    document = [finding._asdict() for finding in findings]
    show(document, as_json, lambda _: findings_text(findings))
    ctx.exit(1 if any(finding.level is Level.FAIL for finding in findings) else 0)
