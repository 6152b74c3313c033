"""A message that no part of the daemon handles is found when the daemon is put together, not when the message comes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tensord.daemon.actors.governor import GovernorActor
from tensord.daemon.actors.mailbox import Mailbox
from tensord.daemon.actors.status import Documents
from tensord.daemon.governor.governor import Governor
from tensord.daemon.governor.limits import GovernorLimits
from tensord.daemon.reports.request_times import RequestTimes

from ..core.stand import Stand
from .stand import serving

ROOT = Path(__file__).parents[3]


def a_session() -> None:
    importlib.import_module("tensord.daemon.actors.session")


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
        64,
        clock=lambda: 0.0,
        tell_store=ignore,
        reading=ignore,
        hasten=ignore,
        tell_watchers=ignore,
        times=RequestTimes(1.0, 1),
    )


def documents() -> None:
    Documents(Mailbox(1), Mailbox(1))


# Each is run in a process of its own: what is declared there is declared for as long as the process lives.
_PROGRAM = """
import asyncio, inspect
from tensord.ipc import messages

class Unheard(messages.{base}, frozen=True):
    pass

from tests.daemon.actors import test_handlers
made = test_handlers.{part}()
if inspect.iscoroutine(made):
    asyncio.run(made)
"""


def outcome(base: str, part: str) -> subprocess.CompletedProcess[str]:
    program = _PROGRAM.format(base=base, part=part)
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("base", "part"),
    [
        ("ControlRequest", "a_session"),
        ("AttachmentRequest", "a_store_actor"),
        ("PrefixRequest", "a_store_actor"),
        ("StoreRequest", "a_store"),
        ("GovernorRequest", "a_governor"),
        ("GaugeRequest", "a_governor_actor"),
        ("StatusRequest", "a_store_actor"),
        ("DaemonQuery", "a_governor_actor"),
        ("DaemonQuery", "documents"),
    ],
)
def test_a_part_that_lacks_a_handler_for_a_message_cannot_be_made(base: str, part: str) -> None:
    ended = outcome(base, part)
    assert ended.returncode == 1, ended
    assert f"TypeError: Unheard is declared as a {base}, and nothing here handles it" in ended.stderr
