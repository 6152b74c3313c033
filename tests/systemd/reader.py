"""A client for the booted machine: stores an entry, reads it again and again, and checks every byte.

usage: reader.py SOCKET. It prints "reading" once the entry was read back. For each line on its standard input it prints
one line of JSON: the verified reads, wrong reads, misses and errors since the line before, at least READS of them.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading

import numpy as np

import tensord

KEY = hashlib.sha256(b"reader").digest()
PAYLOAD = np.frombuffer(hashlib.shake_256(KEY).digest(1 << 16), np.uint8)


READS = 100


class Reader(threading.Thread):
    """Reads until the process ends, with one view held all the time."""

    def __init__(self, client: tensord.Client) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._changed = threading.Condition()
        self._counts = {"right": 0, "wrong": 0, "missed": 0, "raised": 0}
        self._pause = threading.Event()

    def run(self) -> None:
        held = self._client.get(KEY)
        assert held is not None
        while True:
            try:
                lease = self._client.get(KEY)
                found = "missed" if lease is None else "right" if np.array_equal(lease.tree, PAYLOAD) else "wrong"
            except Exception:
                found = "raised"
            if not np.array_equal(held.tree, PAYLOAD):
                found = "wrong"
            with self._changed:
                self._counts[found] += 1
                self._changed.notify()
            # Leaves the daemon some of the processor.
            self._pause.wait(0.0005)

    def taken(self) -> dict[str, int]:
        """The counts, once there are READS of them; they begin anew."""
        with self._changed:
            self._changed.wait_for(lambda: sum(self._counts.values()) >= READS)
            taken, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return taken


def main() -> None:
    with tensord.Client(sys.argv[1]) as client:
        # An entry that a former reader stored is as good.
        put = client.put(KEY, PAYLOAD, wait=True, timeout_s=30)
        assert put.state in ("stored", "existed"), put
        reader = Reader(client)
        reader.start()
        print("reading", flush=True)
        for _ in sys.stdin:
            print(json.dumps(reader.taken()), flush=True)


if __name__ == "__main__":
    main()
