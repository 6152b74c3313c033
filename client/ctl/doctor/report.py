"""`report`: one text file for an issue, without what tells of the site.

Owns: what the file contains, and where it is written. Does not own: the redaction (redaction.py), the findings
(command.py).

Invariants: nothing is written before the command has said what it will contain. An existing file is not replaced. A
part that cannot be had is named with the reason, and the rest is written.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import pwd
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from tensord import __version__

from ....errors import TensordError, UsageError
from ....ipc.messages.control import ConfigQuery, HealthQuery
from ...checkpoints.fingerprint import package_version
from ..daemon import Daemon, pass_daemon
from ..parameters import FILE
from . import facts
from .command import diagnose
from .finding import findings_text
from .redaction import Redaction

LOG_LINES_MAX: Final = 200
_LINE_CHARS_MAX: Final = 2000
_PACKAGES: Final = ("numpy", "msgpack", "msgspec", "uvloop", "xxhash", "torch")
_PERSON_UID_MIN: Final = 1000
_CONTENTS: Final = f"""The report contains, as text:
  versions       of tensorctl, Python and the kernel
  doctor         all findings
  status         the daemon's status, health, and one row for each client with its name
  configuration  every setting of the running daemon, with its source
  log            the last {LOG_LINES_MAX} lines of the service, if this user may read its journal
It has no payloads. Keys and digests, host names, people's user names, home folders and addresses are replaced. Read it
before you attach it to an issue."""


def site() -> Redaction:
    """The redaction for this host."""
    host = socket.gethostname()
    people = [user for user in pwd.getpwall() if user.pw_uid >= _PERSON_UID_MIN and user.pw_name != "nobody"]
    homes = [user.pw_dir for user in people] + [os.environ.get("HOME", "")]
    return Redaction({host, host.partition(".")[0]} - {"localhost"}, [user.pw_name for user in people], homes)


def report_text(daemon: Daemon, redacted: Redaction) -> str:
    """The whole report."""
    parts: list[tuple[str, Callable[[], object]]] = [
        ("versions", _versions),
        ("doctor", lambda: findings_text(diagnose(daemon))),
        ("status", daemon.status),
        ("health", lambda: daemon.ask(HealthQuery)),
        ("clients", daemon.clients),
        ("configuration", lambda: daemon.ask(ConfigQuery)),
        ("log", _log),
    ]
    shown = [(name, _shown(make)) for name, make in parts]
    for _, text in shown:
        redacted.learn(text)
    return "\n".join(f"==== {name}\n{redacted(text)}\n" for name, text in shown)


def _shown(make: Callable[[], object]) -> str:
    try:
        made = make()
    except (TensordError, OSError) as error:
        return f"not available: {type(error).__name__}: {error}"
    return made if isinstance(made, str) else json.dumps(made, indent=1)


def _versions() -> dict[str, Any]:
    return {
        "tensorctl": __version__,
        "python": sys.version,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: package_version(name) for name in _PACKAGES},
        "limits": [dataclasses.asdict(limit) for limit in facts.cgroups()],
    }


def _log() -> str:
    lines = facts.journal(LOG_LINES_MAX)
    return "\n".join(line[:_LINE_CHARS_MAX] for line in lines) or "no lines that this user may read"


@click.command()
@click.option("--output", type=FILE, metavar="FILE", help="The file; by default tensord-report-TIME.txt, here.")
@pass_daemon
def report(daemon: Daemon, output: Path | None) -> None:
    """Writes a redacted report for an issue, and prints its path.

    Says first what the report contains. Works without a daemon too.
    """
    path = output or Path(time.strftime("tensord-report-%Y%m%d-%H%M%S.txt"))
    click.echo(_CONTENTS)
    try:
        # Created first: collecting takes seconds. Only this user may read it.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; name another file with --output") from None
    with os.fdopen(fd, "w", encoding="utf-8", errors="replace") as file:
        file.write(report_text(daemon, site()))
    click.echo(f"\nwritten: {path.absolute()}")
