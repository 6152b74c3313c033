"""`doctor`: collects the facts, runs every check, and prints what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

import click

from tensord import __version__

from ....errors import BadConfiguration, TensordError
from ....ipc.messages.control import HealthQuery
from ....ipc.messages.schema import PROTOCOL_VERSION
from ....ipc.quantities import read_size
from ....shm.lanes import fence
from ..daemon import NAME, Daemon, pass_daemon
from ..orders import leftovers
from ..output import as_json, show
from ..show.configuration import checked
from . import access, facts, memory, software
from .finding import Finding, Level, findings_text

_RING_BYTES_UNKNOWN: Final = 0


def diagnose(daemon: Daemon) -> list[Finding]:
    """All findings about this machine and the daemon behind `daemon`. Failures become findings, not exceptions."""
    found = list(_sockets(daemon))
    status: dict[str, Any] = {}
    try:
        status = daemon.status()
        found += [access.reachable("status", None), *_served(daemon, status)]
    except TensordError as error:
        found.append(access.reachable("status", error))
    try:
        daemon.greeted()
        found.append(access.reachable("control", None))
    except TensordError as error:
        found.append(access.reachable("control", error))
    return [*found, *_around(status)]


def _served(daemon: Daemon, status: dict[str, Any]) -> Iterator[Finding]:
    """What a daemon that answers tells of itself."""
    # A lane without a connection has no version, and tensorctl's own is no client's.
    clients = [row for row in daemon.clients() if row["client"] is not None and row["name"] != NAME]
    yield software.versions(__version__, status["version"], PROTOCOL_VERSION, status["protocol"])
    yield software.clients(status["version"], [row["version"] for row in clients])
    yield from software.health(daemon.ask(HealthQuery))
    yield software.gauges(status["governor"]["gauges"], facts.hardware())
    yield software.values(status["store"]["unstorable"])


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
    yield software.configuration(error, ignored, served=bool(status))
    room = facts.room(ring_bytes, status.get("ring_ready_bytes", 0), status.get("pid"))
    yield from (check(room) for check in (memory.shm, memory.available, memory.cgroup))
    plain, expedited = fence.supported()
    yield memory.membarrier(plain=plain, expedited=expedited, in_use=status.get("fence"))
    uid = status.get("uid", os.geteuid())
    yield access.logout(
        uid=uid,
        system_uid_max=facts.system_uid_max(),
        has_logind=facts.has_logind(),
        lingers=facts.lingers(uid),
        removes=access.removes_ipc(facts.logind_configuration()),
    )
    found = [left for name in leftovers.instances() if (left := leftovers.look(name)) is not None]
    yield from access.leftover(found, status.get("instance"))


def _sockets(daemon: Daemon) -> Iterator[Finding]:
    try:
        paths = {"control": daemon.control_path, "status": daemon.status_path}
    except TensordError as error:
        yield access.reachable("socket", error)
        return
    for what, path in paths.items():
        node, folder, dead = facts.node(path), facts.node(path.absolute().parent), facts.nobody_listens(path)
        without_file = facts.without_file(path) if dead else ()
        yield access.socket(what, path, node, folder, facts.caller(), without_file, dead=dead)


@click.command()
@as_json
@pass_daemon
@click.pass_context
def doctor(ctx: click.Context, daemon: Daemon, as_json: bool) -> None:
    """Checks the environment of a daemon, and says what to do.

    Checks sockets and permissions, the daemon behind them, versions on all sides, how the daemon before ended, its
    health, gauges, values that cannot be stored, the configuration, memory, the fence, deletion at logout, and memory
    of ended daemons. Exit code 1 if anything FAILs.
    """
    findings = diagnose(daemon)
    document = [finding._asdict() for finding in findings]
    show(document, as_json, lambda _: findings_text(findings))
    ctx.exit(1 if any(finding.level is Level.FAIL for finding in findings) else 0)
