"""A message that no part of the daemon handles is found when the daemon is put together, not when the message comes."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tensord.daemon.actors.governor import GovernorActor
from tensord.daemon.actors.mailbox import Mailbox
from tensord.daemon.connections.status import Documents
from tensord.daemon.governor.forms.limits import GovernorLimits
from tensord.daemon.governor.governor import Governor
from tensord.daemon.reports.request_times import RequestTimes
from tensord.ipc.messages import control as messages

from ..core.stand import Stand
from .stand import serving

ROOT = Path(__file__).parents[3]


def a_session() -> None:
    importlib.import_module("tensord.daemon.connections.session")


def a_store() -> None:
    Stand()


def a_governor() -> None:
    Governor(GovernorLimits())


async def a_store_actor() -> None:
    async with serving():
        pass


def a_governor_actor() -> None:
    def ignore(_: object = None) -> None:
        """Nobody listens here."""

    governor = Governor(GovernorLimits())
    GovernorActor(
        governor,
        clock=lambda: 0.0,
        tell_store=ignore,
        reading=ignore,
        hasten=ignore,
        tell_watchers=ignore,
        times=RequestTimes(1.0, 1),
    )


def documents() -> None:
    Documents(Mailbox(1), Mailbox(1))


PARTS = [
    ("ControlRequest", a_session),
    ("AttachmentRequest", a_store_actor),
    ("PrefixRequest", a_store_actor),
    ("StoreRequest", a_store),
    ("GovernorRequest", a_governor),
    ("GaugeRequest", a_governor_actor),
    ("StatusRequest", a_store_actor),
    ("DaemonQuery", a_governor_actor),
    ("DaemonQuery", documents),
]


def make(base: str, part: Callable[[], object]) -> None:
    """Makes a part after a message was declared that nothing handles."""

    class Unheard(getattr(messages, base), frozen=True):  # type: ignore[call-arg, misc]
        pass

    made = part()
    if inspect.iscoroutine(made):
        asyncio.run(made)


def make_each_in_a_fork() -> None:
    """Prints how each making ends. A message that is declared stays so for as long as its process lives."""
    for base, part in PARTS:
        if child := os.fork():
            os.waitpid(child, 0)
            continue
        try:
            make(base, part)
            print(base, part.__name__, "was made", flush=True)
        except TypeError as error:
            print(base, part.__name__, error, flush=True)
        finally:
            os._exit(0)


def test_a_part_that_lacks_a_handler_for_a_message_cannot_be_made() -> None:
    program = f"from {__name__} import make_each_in_a_fork; make_each_in_a_fork()"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ended.stdout.splitlines() == [
        f"{base} {part.__name__} Unheard is declared as a {base}, and nothing here handles it: add it"
        for base, part in PARTS
    ], ended
