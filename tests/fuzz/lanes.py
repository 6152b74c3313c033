"""Fuzzes lanes: hostile clients overwrite, cut and extend them while the daemon evicts, drains and restarts."""

from __future__ import annotations

import os
import random
from typing import Final

from tensord.errors import TensordError
from tensord.shm.ring.layout import LANE_BYTES, LANE_HEADER_WORDS, LANE_WORDS

from ..daemon_process import MIB, until
from ..faults.payloads import key as other_key
from ..faults.payloads import payload as other_payload
from ..faults.raw import RawClient
from .besieged import Besieged

STEPS: Final = 150
CHECK_EVERY: Final = 15
HOSTILE_MAX: Final = 4
_STEPS: Final = [*["write", "put"] * 3, "size", "join", "leave", "ask", "restart"]
_SIZES: Final = (0, 1, 8, 4095, 4096, 4100, LANE_BYTES - 1, LANE_BYTES, LANE_BYTES + 4096, 4 * MIB)
_WORDS: Final = (0, 1, 2, (1 << 64) - 1, 1 << 63, (1 << 48) + 1, 2 << 48 | 1, 0xFFFF << 48 | 5)


def lanes(chance: random.Random, besieged: Besieged) -> None:
    daemon = besieged.daemon
    hostile: list[RawClient] = []
    puts = 0
    try:
        for step in range(STEPS):
            match chance.choice(_STEPS):
                case "join" if len(hostile) < HOSTILE_MAX:
                    hostile.append(RawClient(daemon.socket))
                case "leave" if hostile and chance.random() < 0.5:
                    hostile.pop(chance.randrange(len(hostile))).close()
                case "write" if hostile:
                    _write(chance, chance.choice(hostile).fds[2])
                case "size" if hostile:
                    os.ftruncate(chance.choice(hostile).fds[2], chance.choice(_SIZES))
                case "put":
                    for _ in range(chance.randrange(1, 12)):
                        puts += 1
                        besieged.client.put(other_key(puts), other_payload(puts, chance.choice([4096, 200_000])))
                case "ask":
                    daemon.client_rows()
                case "restart" if chance.random() < 0.15:
                    besieged.end(at_once=chance.random() < 0.5)
                    daemon.start()
                    until(lambda: besieged.client.wait_connected(1.0), "the witness client to attach again")
            if not step % CHECK_EVERY:
                besieged.check()
    finally:
        for client in hostile:
            client.close()
    besieged.settle()


def _write(chance: random.Random, fd: int) -> None:
    """Writes a range of random words into the header, the pins or the log, or across their borders."""
    first = chance.choice([0, 0, 1, 2, 8, 16, LANE_HEADER_WORDS, LANE_HEADER_WORDS + LANE_WORDS, LANE_BYTES // 8 - 1])
    count = chance.choice([1, 1, 8, 600, LANE_WORDS])
    words = b"".join(_word(chance).to_bytes(8, "little") for _ in range(min(count, 64)))
    try:
        os.pwrite(fd, words * (count // 64 or 1), first * 8 + chance.choice([0, 0, 0, 3]))
    except OSError as error:
        raise TensordError(f"the lane cannot be written: {error}") from error


def _word(chance: random.Random) -> int:
    """Draws a word that may be a span id or a position in the log."""
    return chance.choice([chance.choice(_WORDS), 1 << 48 | chance.randrange(1, 2000), chance.getrandbits(64)])
