"""`config check`: what the daemon would make of its configuration.

The settings are the daemon's, and a client imports nothing of it: so the daemon itself is run, with `--check-config`,
and says what it would do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import click

from ...errors import BadConfiguration
from .parameters import FILE
from .tables import table

_DAEMON: Final = (sys.executable, "-m", "tensord.daemon", "--check-config", "--json")
_TIMEOUT_S: Final = 30.0


def settings(file: Path | None = None, timeout_s: float = _TIMEOUT_S) -> list[dict[str, Any]]:
    """Every setting as a daemon started here and now would have it: rows of key, value, source and reload.

    Raises:
        BadConfiguration: what the daemon says is wrong.
    """
    flags = () if file is None else ("--config", str(file))
    try:
        asked = subprocess.run(
            [*_DAEMON, *flags], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise BadConfiguration(f"the daemon's own check did not end within {timeout_s:g} s; try again") from None
    if asked.returncode:
        said = asked.stderr.strip().splitlines() or [f"the daemon's own check ended with {asked.returncode}"]
        raise BadConfiguration(said[-1].removeprefix("tensord: "))
    rows: list[dict[str, Any]] = json.loads(asked.stdout)
    return rows


@click.group()
def config() -> None:
    """The daemon's configuration."""


@config.command()
@click.option(
    "--config",
    "file",
    type=FILE,
    metavar="FILE",
    help="The TOML file to check.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def check(file: Path | None, as_json: bool) -> None:
    """Every setting as a daemon started here would have it, and where it comes from.

    Looks at TENSORD_* variables and at FILE ($TENSORD_CONFIG, else the user's or the system's file), as this user: the
    service manager may give its daemon others. Exit code 1 says that a daemon would refuse to start.
    """
    rows = settings(file)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    shown = [(row["key"], row["value"], row["source"], "yes" if row["reload"] else "") for row in rows]
    click.echo(table(("SETTING", "VALUE", "FROM", "RELOADS"), shown))
