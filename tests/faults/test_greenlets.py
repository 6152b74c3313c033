"""gevent in the client's process: a greenlet that waits for another one's value lets it compute, also in one thread."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from ..daemon_process import PATIENCE_S, Daemon
from .payloads import key

PROGRAM = """
import sys
from pathlib import Path
socket, key, imported, patched = sys.argv[1], bytes.fromhex(sys.argv[2]), sys.argv[3], sys.argv[4]
if imported == "before":
    import tensord
    tensord.Client
from gevent import monkey
if patched != "nothing":
    monkey.patch_all(thread=patched == "all")
import gevent
import tensord

# Longer than the test waits: who waits for a time limit has failed.
client = tensord.Client(socket, timeout_s=1e6)
computing, go_on = gevent.event.Event(), gevent.event.Event()
computed = []

def compute():
    computing.set()
    go_on.wait()
    computed.append(1)
    return "value"

def ask():
    return client.get_or_compute(key, compute)

first = gevent.spawn(ask)
computing.wait()
second = gevent.spawn(ask)
gevent.spawn_later(0, go_on.set)
print(ask(), first.get(), second.get(), len(computed), client.tally.waited)
print(client.put(bytes(32), 1, wait=True).state, client.touch(bytes(32)), client.get(bytes(32)).tree)
client.close()
"""


@pytest.mark.skipif(find_spec("gevent") is None, reason="gevent is not installed")
@pytest.mark.parametrize(
    ("imported", "patched"), [("after", "all"), ("after", "all but threads"), ("after", "nothing"), ("before", "all")]
)
def test_greenlets_of_one_thread_compute_once(daemon: Daemon, imported: str, patched: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(daemon.socket), key(1).hex(), imported, patched]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.stdout == "value value value 1 2\nstored 1 1\n", ended.stderr
    assert ended.returncode == 0 and not ended.stderr
