"""A client in a container: its own pids, its own IPC, its own /dev/shm, with nothing but the socket's folder shared."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from ..daemon_process import Daemon
from .payloads import key

INSIDE = 'mount -t tmpfs tmpfs /dev/shm && mount -t proc proc /proc && exec "$@"'
UNSHARED = ["unshare", "--pid", "--ipc", "--mount", "--fork", "--kill-child", "sh", "-c", INSIDE, "sh"]
PROGRAM = """
import json, os, sys
import numpy as np
import tensord
client, theirs, own = tensord.Client(sys.argv[1], timeout_s=30.0), *map(bytes.fromhex, sys.argv[2:])
found = client.get(theirs).tree.tolist()
stored = client.put(own, np.array([7, 8]), wait=True).state
computed = client.get_or_compute(own, lambda: np.zeros(1)).tolist()
print(json.dumps([os.getpid(), os.listdir("/dev/shm"), found, stored, computed]), flush=True)
sys.stdin.read()
"""


def may_unshare() -> bool:
    try:
        return not subprocess.run([*UNSHARED, "true"], capture_output=True).returncode
    except OSError:
        return False


@pytest.mark.root
def test_a_client_in_a_container_shares_entries_with_one_outside(daemon: Daemon) -> None:
    if not may_unshare():
        pytest.skip("no namespaces for this user here")
    outside = daemon.client()
    assert outside.put(key(1), np.arange(5), wait=True).state == "stored"
    words = [sys.executable, "-c", PROGRAM, str(daemon.socket), key(1).hex(), key(2).hex()]
    with subprocess.Popen([*UNSHARED, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as container:
        assert container.stdout is not None
        assert json.loads(container.stdout.readline()) == [1, [], [0, 1, 2, 3, 4], "stored", [7, 8]]
        lease = outside.get(key(2))
        assert lease is not None and lease.tree.tolist() == [7, 8]
        assert sorted(row["pid"] == 1 for row in daemon.client_rows()) == [False, True]
