"""tensorctl as a program: its options, its commands, and how every failure is told.

Owns: exit codes and the one line on stderr. 0: done; 1: refused, not reachable, or found unhealthy; 2: wrongly typed.
Ctrl-C ends `--watch` and `watch` with 0 and anything else with 130; a closed pipe ends everything quietly.
Does not own what a command does: each stands in a module of its own.
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
from .completion import completion
from .configuration import config
from .daemon import NAME, Daemon
from .doctor.command import doctor
from .drill import drill
from .entries import ls, show
from .live import clients, watch
from .orders import clear, evict, limit
from .parameters import DURATION, FILE
from .purge import purge
from .status import health, status
from .top import top
from .why import why

TRACEBACK_VARIABLE: Final = "TENSORCTL_TRACEBACK"
_INTERRUPTED: Final = 130
_TIMEOUT_S_MAX: Final = 3600.0


class _Commands(click.Group):
    """Ends where click would say "Aborted!", or report a closed pipe as a failure."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            done = super().invoke(ctx)
            sys.stdout.flush()
            return done
        except BrokenPipeError:
            # What is still buffered must not fail again when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(0)
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)


@click.group(cls=_Commands, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=NAME, message="%(prog)s %(version)s")
@click.option(
    "--socket",
    type=FILE,
    help="The control socket; without it $TENSORD_SOCKET, the user's own, or the system's.",
)
@click.option(
    "--status-socket",
    type=FILE,
    help="The status socket; without it $TENSORD_STATUS_SOCKET, or the one beside the control socket.",
)
@click.option(
    "--timeout", type=DURATION, default="5s", show_default=True, metavar="TIME", help="How long an answer may take."
)
@click.pass_context
def cli(ctx: click.Context, socket: Path | None, status_socket: Path | None, timeout: float) -> None:
    """Looks at a tensord, and tells it what to do.

    Exit codes: 0 done; 1 refused, not reachable or found unhealthy; 2 wrongly typed.
    """
    if not 0 < timeout <= _TIMEOUT_S_MAX:
        raise click.UsageError(f"--timeout {timeout:g} s: must be above 0 and at most {_TIMEOUT_S_MAX:g} s")
    daemon = Daemon(socket, status_socket, timeout)
    ctx.obj = daemon
    ctx.call_on_close(daemon.close)


for _command in (
    status,
    top,
    ls,
    show,
    why,
    clients,
    watch,
    limit,
    evict,
    clear,
    drill,
    purge,
    health,
    doctor,
    config,
    completion,
):
    cli.add_command(_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit code; raises nothing."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # The caller has closed it (`>&-`): nobody wants to read it.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
    try:
        code = cli.main(None if argv is None else list(argv), prog_name=NAME, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else NAME
        return _told(f"{error.format_message().rstrip('.')}; see `{path} --help`", error.exit_code)
    except click.ClickException as error:
        return _told(error.format_message(), error.exit_code)
    except (TensordError, OSError) as error:
        return _told(str(error) or type(error).__name__, 1)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        told = f"a fault of tensorctl's own, {type(error).__name__}: {error}"
        return _told(f"{told}; report it with what {TRACEBACK_VARIABLE}=1 shows", 1)


def _told(text: str, code: int) -> int:
    print(f"{NAME}: {' '.join(text.split())}", file=sys.stderr)
    return code
