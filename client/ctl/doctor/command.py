"""`doctor`: collects the facts, runs every check, and prints what to do."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import click

from tensord import __version__

from ....errors import BadConfiguration, TensordError
from ....ipc.places import METRICS_NAME
from ....ipc.quantities import read_size
from ....ipc.schema import PROTOCOL_VERSION
from ....shm import fence
from ...identity.packages import package_version
from .. import leftovers
from ..configuration import checked
from ..daemon import NAME, Daemon, pass_daemon
from . import access, facts, memory, pressure, software, values
from .finding import Finding, Level, findings_text
from .probe import probed

_RING_BYTES_UNKNOWN: Final = 0


def diagnose(daemon: Daemon) -> list[Finding]:
    """All findings about this machine and the daemon behind `daemon`. Failures become findings, not exceptions."""
    status, status_error = _status(daemon)
    configured, ignored, configuration_error = _configured()
    pid = status.get("pid")
    ring_bytes = status.get("ring_bytes", configured)
    room = facts.room(ring_bytes, status.get("ring_ready_bytes", 0), pid)
    plain, expedited = fence.supported()
    whose, limit_bytes, privileged = facts.memlock(pid)
    uid = status.get("uid", os.geteuid())
    caller = facts.caller()
    hardware = facts.hardware()
    metrics = _metrics_path(daemon) if status else None
    former: dict[str, Any] = status.get("former", {})
    governor = status.get("governor", {})
    found = [left for name in leftovers.instances() if (left := leftovers.look(name)) is not None]
    return [
        *_sockets(daemon, caller),
        *access.unreachable(status.get("socket_problems", ())),
        access.reachable("status", status_error),
        access.reachable("control", _greeting(daemon)),
        software.versions(__version__, status.get("version"), PROTOCOL_VERSION, status.get("protocol")),
        software.clients(status.get("version"), _client_versions(daemon) if status else ()),
        software.last_end(
            former,
            facts.journal_of_end() if former.get("end") in ("failed", "killed") else (),
            served=bool(status),
        ),
        software.clock(status.get("clock_stepped_s")),
        software.python(sys.version_info[:3], {name: package_version(name) for name in software.PACKAGES}),
        software.configuration(configuration_error, ignored, served=bool(status)),
        memory.shm(room),
        memory.available(room),
        memory.cgroup(room),
        memory.sizes(status.get("configured"), ring_bytes, status.get("store", {}).get("max_entries", 0)),
        memory.memlock(whose, limit_bytes, ring_bytes, privileged=privileged),
        memory.membarrier(plain=plain, expedited=expedited, in_use=status.get("fence")),
        access.logout(
            uid=uid,
            system_uid_max=facts.system_uid_max(),
            has_logind=facts.has_logind(),
            lingers=facts.lingers(uid),
            removes=access.removes_ipc(facts.logind_texts()),
        ),
        *access.leftover(found, status.get("instance")),
        pressure.gauges(
            governor.get("gauges"), hardware, governor.get("sources", ()), governor.get("missing_cards", ())
        ),
        pressure.metrics(metrics, None if metrics is None else facts.scrape(metrics, daemon.timeout_s)),
        values.stored(status.get("store", {}).get("unstorable")),
        *software.gpus(probed(), hardware),
    ]


def _status(daemon: Daemon) -> tuple[dict[str, Any], TensordError | None]:
    try:
        return daemon.status(), None
    except TensordError as error:
        return {}, error


def _greeting(daemon: Daemon) -> TensordError | None:
    try:
        daemon.greeted()
    except TensordError as error:
        return error
    return None


def _client_versions(daemon: Daemon) -> list[str]:
    """The version of each connected client but tensorctl's own. A lane without a connection has none."""
    try:
        rows = daemon.clients()
    except TensordError:
        return []
    return [row.get("version", "") for row in rows if row["client"] is not None and row["name"] != NAME]


def _metrics_path(daemon: Daemon) -> Path:
    """The default path of the metrics socket."""
    return daemon.control_path.with_name(METRICS_NAME)


def _configured() -> tuple[int, list[str], str | None]:
    """(ring_bytes of a daemon started here, what it would ignore, None), or (0, [], the error in the configuration)."""
    try:
        rows, ignored = checked()
    except BadConfiguration as error:
        return _RING_BYTES_UNKNOWN, [], str(error)
    ring_bytes = next((read_size(row["value"]) for row in rows if row["key"] == "ring_bytes"), _RING_BYTES_UNKNOWN)
    return ring_bytes, ignored, None


def _sockets(daemon: Daemon, caller: access.Caller) -> list[Finding]:
    try:
        paths = {"control": daemon.control_path, "status": daemon.status_path}
    except TensordError as error:
        return [access.reachable("socket", error)]
    return [
        access.socket(
            what,
            path,
            facts.node(path),
            facts.node(path.absolute().parent),
            caller,
            facts.without_file(path) if facts.nobody_listens(path) else (),
            dead=facts.nobody_listens(path),
        )
        for what, path in paths.items()
    ]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of findings.")
@pass_daemon
@click.pass_context
def doctor(ctx: click.Context, daemon: Daemon, as_json: bool) -> None:
    """Checks the environment of a daemon, and says what to do.

    Checks sockets and permissions, the daemon behind them, versions on all sides, how the daemon before ended, the
    clock, configuration, memory, the fence, deletion at logout, memory of ended daemons, gauges, metrics, values that
    cannot be stored, and GPU bindings. Exit code 1 if anything FAILs.
    """
    findings = diagnose(daemon)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        click.echo(findings_text(findings))
    ctx.exit(1 if any(finding.level is Level.FAIL for finding in findings) else 0)
