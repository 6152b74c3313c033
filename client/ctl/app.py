"""tensorctl as a program: its options, its commands, and the report of failures.

Owns: exit codes and the one line on stderr. Ctrl-C ends `watch` with 0, every other command with 130. A closed pipe
ends every command silently.

Invariant: `main` raises only for a fault of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from tensord import __version__

from ...errors import TensordError
from .daemon import NAME, Daemon
from .doctor import doctor
from .install import install
from .leftovers import purge
from .orders import clear, evict, limit, reload, room
from .parameters import FILE, time_option
from .show import advise, clients, config, health, latency, ls, status, watch, why

_INTERRUPTED: Final = 130


class _Commands(click.Group):
    """A group of commands that handles Ctrl-C and closed pipes. click would print "Aborted!", or report a failure."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            done = super().invoke(ctx)
            sys.stdout.flush()
            return done
        except BrokenPipeError:
            # Redirects stdout, so that flushing the remaining buffer at exit does not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(0)
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)


@click.group(cls=_Commands, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=NAME, message="%(prog)s %(version)s")
@click.option(
    "--socket", type=FILE, help="The control socket; by default $TENSORD_SOCKET, the user's own, or the system's."
)
@click.option(
    "--status-socket",
    type=FILE,
    help="The status socket; by default $TENSORD_STATUS_SOCKET, or the one beside the control socket.",
)
@time_option("--timeout", "timeout", 3600.0, "5s", "Time limit for one answer.")
@click.pass_context
def cli(ctx: click.Context, socket: Path | None, status_socket: Path | None, timeout: float) -> None:
    """Shows the state of a tensord daemon, and controls it.

    Exit codes: 0 done; 1 refused, not reachable or unhealthy; 2 invalid arguments.
    """
    ctx.obj = daemon = Daemon(socket, status_socket, timeout)
    ctx.call_on_close(daemon.close)


for _command in (status, ls, why, advise, clients, latency, watch, health, config):
    cli.add_command(_command)
for _command in (limit, room, evict, clear, purge, reload, install, doctor):
    cli.add_command(_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit code."""
    try:
        code = cli.main(None if argv is None else list(argv), prog_name=NAME, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else NAME
        text = error.format_message().rstrip(".")
        return _told(f"{text}{' See' if text.endswith('?') else '; see'} `{path} --help`", error.exit_code)
    except click.ClickException as error:
        return _told(error.format_message(), error.exit_code)
    except (TensordError, OSError) as error:
        return _told(str(error) or type(error).__name__, 1)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _told(text: str, code: int) -> int:
    print(f"{NAME}: {' '.join(text.split())}", file=sys.stderr)
    return code
