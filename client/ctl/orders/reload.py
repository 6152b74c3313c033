"""`reload`: has the daemon read its configuration again, and tells the verdict.

Owns: the signal, the wait for the verdict, the output. Does not own: what a reload changes (the daemon).
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Final

import click

from ....errors import SocketForbidden, TimedOut
from ....ipc.messages.control import ConfigQuery
from ..daemon import Daemon, pass_daemon
from ..output import counted

_LOOK_EVERY_S: Final = 0.02


def verdict_text(verdict: dict[str, Any]) -> str:
    """An accepted reload, one line for each setting."""
    lines = [f"{row['key']} {row['before']} -> {row['after']}" for row in verdict["applied"]]
    lines += [f"{row['key']} {row['before']} -> {row['after']}: needs a restart" for row in verdict["waiting"]]
    return "\n".join([*lines, f"reloaded: {counted(len(verdict['applied']), 'setting', 'settings')} changed"])


@click.command()
@pass_daemon
@click.pass_context
def reload(ctx: click.Context, daemon: Daemon) -> None:
    """Has the daemon read its configuration again (SIGHUP), and waits for the verdict.

    Exit code 0: all changed settings that need no restart are in force. Exit code 1: the daemon refused the
    configuration and changed nothing. Only the daemon's own user and root may send the signal.
    """
    before = daemon.ask(ConfigQuery)["reload"]["number"]
    status = daemon.status()
    try:
        os.kill(status["pid"], signal.SIGHUP)
    except (PermissionError, ProcessLookupError) as error:
        raise SocketForbidden(
            f"cannot send SIGHUP to pid {status['pid']} of uid {status['uid']} ({error.strerror}): run it as that user "
            "or root, on the daemon's host and not in another container"
        ) from None
    deadline = time.monotonic() + daemon.timeout_s
    while (verdict := daemon.ask(ConfigQuery)["reload"])["number"] == before:
        if time.monotonic() > deadline:
            raise TimedOut(f"the daemon gave no verdict within {daemon.timeout_s:g} s: see its log")
        time.sleep(_LOOK_EVERY_S)
    if verdict["refused"]:
        click.echo(f"tensorctl: refused, the configuration is unchanged: {verdict['refused']}", err=True)
        ctx.exit(1)
    click.echo(verdict_text(verdict))
