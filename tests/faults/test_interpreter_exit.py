"""A program ends, whatever its objects do while the interpreter ends: by then daemon threads no longer run."""

from __future__ import annotations

from typing import Final

import pytest

import tensord

from ..daemon_process import PATIENCE_S, Daemon
from ..processes import python
from .test_what_raises import NEVER

HEAD: Final = """
import sys
import numpy as np
import tensord

SOCKET = sys.argv[1]
KEY = bytes(range(32))


class AtExit:
    def __init__(self, act):
        self.act, self.finalizing = act, sys.is_finalizing

    def __del__(self):
        assert self.finalizing(), "too early: the interpreter does not end yet"
        self.act()


def tolerant(act, errors=tensord.TensordError):
    def tried():
        try:
            act()
        except errors:
            pass
    return tried


client = tensord.Client(SOCKET, timeout_s=20)
client.put(KEY, np.arange(10), wait=True) if client.connected else None
"""
ACTS: Final = {
    "close with a lease": "lease = client.get(KEY)\nended = AtExit(client.close)",
    "close with a put under way": "put = client.put(bytes(32), np.zeros(1 << 24))\nended = AtExit(client.close)",
    "put without waiting": "ended = AtExit(tolerant(lambda put=client.put, it=np.ones(1 << 22): put(bytes(32), it)))",
    "commit": """
reservation = client.reserve(tensord.Spec((1 << 20,), 'uint8'))
ended = AtExit(tolerant(lambda commit=reservation.commit: commit(bytes(32))))
""",
    "claim": "claim = client.claim(bytes(32))",
    "reservation": "reservation = client.reserve(tensord.Spec((1 << 20,), 'uint8'))",
    "view": "view = client.get(KEY).tree\nclient.close()",
    "pending get_or_compute": """
import asyncio
loop = asyncio.new_event_loop()
asyncio.set_event_loop(loop)
shared = tensord.AsyncClient(SOCKET, timeout_s=20)


async def compute():
    await asyncio.sleep(3600)


task = loop.create_task(shared.get_or_compute(bytes(32), compute))
loop.run_until_complete(asyncio.sleep(0.5))
""",
}
"""What the calls one by one, below, do not have."""
HOLDER: Final = """
import atexit, gc, sys, threading, time


def hold():
    due.wait()
    owners = [each for each in gc.get_objects() if str(type(each).__module__).startswith("tensord.")]
    owners += [module for name, module in sys.modules.items() if name.startswith("tensord.")]
    values = [value for each in owners for value in list(getattr(each, "__dict__", {}).values())]
    kinds = type(threading.Lock()), type(threading.RLock())
    locks = [value for value in values if isinstance(value, kinds)]
    assert locks
    for lock in locks:
        lock.acquire(timeout=0.1)  # or another thread has it, which is stopped as well
    del owners, values
    held.set()
    time.sleep(3600)


@atexit.register  # first, so it is called last
def wait_for_holder():
    due.set()
    held.wait()


due, held = threading.Event(), threading.Event()
threading.Thread(target=hold, daemon=True).start()
"""
HOLD_ALL_LOCKS: Final = f"exec({HOLDER!r}, {{}})\n"
"""A thread that holds the library's locks when the interpreter stops it. Its names are its own, since they stay."""


def ends(program: str, *words: str) -> str:
    """What a program says that ends as it should."""
    ended = python("-c", program, *words, timeout_s=2 * PATIENCE_S)
    assert ended.returncode == 0, ended.stderr
    assert "ignored" not in ended.stderr, ended.stderr
    return ended.stderr


@pytest.mark.parametrize("before", ["", HOLD_ALL_LOCKS], ids=["locks free", "locks held"])
@pytest.mark.parametrize("act", ACTS)
def test_a_program_ends_whatever_its_objects_do_at_exit(shared: Daemon, act: str, before: str) -> None:
    ends(before + HEAD + ACTS[act], str(shared.socket))


EVERY_CALL: Final = """
import pathlib, tempfile
from tests.faults import test_what_raises as table

kind = getattr(tensord, sys.argv[2])
folder = tempfile.TemporaryDirectory()
it = table.instance(kind, client, pathlib.Path(folder.name))
# What Python imports at its first use has to be used before.
table.graph(), tensord.AsyncClient, tensord.Spec, tensord.Feature, table.payload(1)
calls = {**table.NEVER[kind], **table.RAISES[kind]}
calls["close"] = calls.pop("close", lambda it: None)
calls = {name: calls[name] for name in sys.argv[3:] or calls}


def every(it=it, calls=calls, typed=tensord.TensordError, every_error=BaseException, write=sys.__stderr__.write):
    for name, call in calls.items():
        try:
            call(it)
        except typed:
            pass
        except every_error as error:
            write(f"RAW {name}: {error!r}")
    write("all were called")


ended = AtExit(every)
"""


WITH_LOCKS_HELD: Final[dict[type, list[str]]] = {
    tensord.Client: ["get", "put", "put_many", "get_or_compute", "reserve", "evict", "status", "claim", "close"],
    tensord.DeviceCache: ["close"],
}
"""Calls that wait for no lock."""


@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize(
    ("kind", "before", "calls"),
    [*((kind, "", []) for kind in NEVER), *((kind, HOLD_ALL_LOCKS, calls) for kind, calls in WITH_LOCKS_HELD.items())],
    ids=lambda each: each.__name__ if isinstance(each, type) else "locks held" if each == HOLD_ALL_LOCKS else "",
)
def test_no_call_raises_another_error_than_the_librarys_at_exit(
    shared: Daemon, kind: type, before: str, calls: list[str], *, present: bool
) -> None:
    socket = str(shared.socket) if present else f"{shared.socket}-nobody"
    said = ends(before + HEAD + EVERY_CALL, socket, kind.__name__, *calls)
    assert "all were called" in said and "RAW" not in said, said
