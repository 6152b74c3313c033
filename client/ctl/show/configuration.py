"""`config`: the settings of the running daemon; and for other commands, those that a daemon started here would have.

Owns: the output. Does not own: the settings. A client must not import the daemon, so the daemon is run with
`--check-config`, and reports its settings.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Final, NamedTuple

import click

from ....errors import BadConfiguration
from ....ipc.messages.control import ConfigQuery
from ..daemon import NAME, Daemon, pass_daemon
from ..output import as_json, show, table

_PREFIX: Final = "tensord: "
_DAEMON: Final = (sys.executable, "-m", "tensord.daemon", "--check-config", "--json")
_TIMEOUT_S: Final = 30.0


class Checked(NamedTuple):
    """What a daemon started here and now would have: rows with key, value, source and reload, one for each setting, and
    a text for each ignored variable."""

    rows: list[dict[str, Any]]
    ignored: list[str]


def checked(timeout_s: float = _TIMEOUT_S) -> Checked:
    """The configuration of a daemon started here and now.

    Raises:
        BadConfiguration: the configuration is invalid; the message is the daemon's.
    """
    try:
        asked = subprocess.run(
            _DAEMON, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise BadConfiguration(f"the daemon's own check did not end within {timeout_s:g} s; try again") from None
    if asked.returncode:
        said = asked.stderr.strip().splitlines() or [f"the daemon's own check ended with {asked.returncode}"]
        raise BadConfiguration(said[-1].removeprefix(_PREFIX))
    told = asked.stderr.splitlines()
    return Checked(json.loads(asked.stdout), [line.removeprefix(_PREFIX) for line in told if line.startswith(_PREFIX)])


def wanted(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The setting `name`, or all settings of the table `name`.

    Raises:
        UsageError: there is no such setting.
    """
    found = [row for row in rows if row["key"] == name or row["key"].startswith(f"{name}.")]
    if not found:
        raise click.UsageError(f"No such setting {name!r}; `tensorctl config` has all")
    return found


@click.command()
@click.argument("name", required=False)
@as_json
@pass_daemon
def config(daemon: Daemon, name: str | None, as_json: bool) -> None:
    """The settings of the running daemon, and where each came from.

    NAME is a setting, such as limits.clients_max, or a table, such as limits. FROM: "default", "file PATH", "env
    VARIABLE", "flag --NAME"; "ring" where existing memory decides, and "tensorctl limit" after that command.
    """
    body = daemon.ask(ConfigQuery)
    rows, verdict = body["settings"], body["reload"]
    rows = rows if name is None else wanted(rows, name)
    shown = [(row["key"], row["value"], row["source"]) for row in rows]
    show(rows, as_json, lambda _: table(("SETTING", "VALUE", "FROM"), shown))
    if verdict["refused"]:
        click.echo(f"{NAME}: the last reload was refused: {verdict['refused']}", err=True)
    if verdict["waiting"]:
        keys = ", ".join(row["key"] for row in verdict["waiting"])
        click.echo(f"{NAME}: these wait for a restart: {keys}", err=True)
