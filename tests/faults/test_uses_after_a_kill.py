"""How often an entry was used counts on after SIGKILL, also if the daemon has saved nothing of what it learned."""

from __future__ import annotations

import numpy as np

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from .payloads import key

HOT, COLD, NEW = range(15), range(100, 115), range(200, 215)


def test_entries_in_use_outlive_unused_ones_after_the_daemon_was_killed() -> None:
    payload = np.zeros(120 << 10, np.uint8)
    with Daemon(ring_bytes=4 * MIB) as daemon:
        client = daemon.start().client(timeout_s=PATIENCE_S)
        for number in HOT:
            assert client.put(key(number), payload, wait=True).state == "stored"
            for _ in range(11):
                assert client.get(key(number)) is not None
        until(lambda: all((r := client.reuse(key(n))) and r.uses >= 11 for n in HOT), "the uses to be counted")
        # Later than any use of the others.
        for number in COLD:
            assert client.put(key(number), payload, wait=True).state == "stored"
        daemon.kill()
        daemon.start()
        daemon.attached(client)
        for number in NEW:
            assert client.put(key(number), payload, wait=True, timeout_s=PATIENCE_S).state == "stored"
        assert [number for number in HOT if not client.contains(key(number))] == []
