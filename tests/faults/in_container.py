"""Run by test_containers.py inside namespaces of its own: a client that does what standard input says, line by line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import tensord


def main(socket: str) -> None:
    client = tensord.Client(socket, timeout_s=30.0)
    held: list[Any] = []
    for line in sys.stdin:
        order, *rest = json.loads(line)
        answer: object
        match order:
            case "look around":
                segments = [path.name for path in Path("/dev/shm").iterdir()]
                answer = {"pid": os.getpid(), "shm": segments, "connected": client.connected}
            case "put":
                answer = client.put(bytes.fromhex(rest[0]), np.array(rest[1]), wait=True).state
            case "get":
                lease = client.get(bytes.fromhex(rest[0]))
                answer = None if lease is None else lease.tree.tolist()
                held.append(lease)
            case "read what you hold":
                answer = [lease.tree.tolist() for lease in held]
            case "computed":
                computed = np.array(rest[1])
                answer = client.get_or_compute(bytes.fromhex(rest[0]), computed.copy).tolist()
            case _:
                raise ValueError(order)
        print(json.dumps(answer), flush=True)


main(sys.argv[1])
