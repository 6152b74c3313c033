"""Fuzzes lanes and their queues: hostile clients add records of any content, ask for grants and return them in any
order, and overwrite, cut and extend their lanes, while the daemon evicts and restarts.

A client that writes into the ring writes in its own places only: it could damage any other in a better way. What it
puts there may be no tree, and readers miss it. What comes through an inbox is checked before any reader sees it.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Final

from tensord.errors import Corrupt, TensordError
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.schema import PREFIX_BYTES_MAX
from tensord.shm.lanes.records import NO_KEY, RECORD, SUBMITTED_AT, WAITS_AT
from tensord.shm.ring.layout import (
    LANE_BYTES,
    LANE_HEADER_WORDS,
    LANE_WORDS,
    QUEUE_AT,
    QUEUE_RECORDS,
    RECORD_BYTES,
    SPAN_HEADER_BYTES,
)
from tensord.shm.ring.segments import create_inbox

from ..daemon_process import until
from ..faults.payloads import key as other_key
from ..faults.payloads import payload as other_payload
from ..faults.raw import RawClient
from . import words
from .besieged import Besieged, key

STEPS: Final = 250
CHECK_EVERY: Final = 25
HOSTILE_MAX: Final = 3
_RARE: Final = ("join", "leave", "return", "head", "waits", "bytes", "read", "bell", "cut", "rows", "restart")
_STEPS: Final = [*["put"] * 12, *["ask"] * 3, *["words"] * 3, *["store"] * 3, *_RARE]
_LANE_SIZES: Final = (0, 1, 8, 4095, 4096, QUEUE_AT, QUEUE_AT + 100, LANE_BYTES - 1, LANE_BYTES, LANE_BYTES + 4096)
_WORDS: Final = (0, 1, 2, (1 << 64) - 1, 1 << 63, (1 << 48) + 1, 2 << 48 | 1, 0xFFFF << 48 | 5)
_SIZES: Final = (1, 64, 191, 192, 256, 4096, 20_000, 100_000, 1 << 20, 1 << 40, (1 << 48) - 1)
_NUMBERS: Final = (0, 1, 63, 64, 191, 1 << 16, 1 << 31, 1 << 47, 1 << 48, (1 << 63) - 1, 1 << 63, (1 << 64) - 64)
_TIMES: Final = (0.0, 1e-9, 0.01, 5.0, 1e9, 1e300, -1.0, float("nan"), float("inf"), float("-inf"))
_FIELDS: Final = 15


@dataclass(eq=False)
class Hostile:
    """A client that says and writes what it likes. `memory_fd`: the ring, or its inbox."""

    raw: RawClient
    memory_fd: int
    number: int = 0
    grants: list[tuple[int, int, int]] = field(default_factory=list)
    """(number, offset, bytes)."""

    def close(self) -> None:
        os.close(self.memory_fd)
        self.raw.close()


def queues(chance: random.Random, besieged: Besieged, *, in_place: bool) -> None:
    """Plays one round with clients that write into the ring, or have an inbox, as those of another uid."""
    besieged.may_be_corrupt = in_place
    hostile: list[Hostile] = []
    puts = count(1)
    ring_bytes = int(besieged.client.status()["store"]["ring_bytes"])
    try:
        for step in range(STEPS):
            one = chance.choice(hostile) if hostile else None
            what = chance.choice(_STEPS)
            try:
                if what == "join" and len(hostile) < HOSTILE_MAX:
                    hostile.append(_joined(besieged, ring_bytes, in_place=in_place))
                elif what == "read":
                    _read(besieged, chance.choice(words.KEYS), sound=not in_place)
                elif what == "store":
                    for number in islice(puts, chance.randrange(1, 12)):
                        besieged.client.put(other_key(number), other_payload(number, chance.choice([4096, 200_000])))
                elif what == "rows":
                    besieged.daemon.client_rows()
                elif what == "restart" and chance.random() < 0.15:
                    for each in hostile:
                        each.grants.clear()
                    besieged.end(at_once=chance.random() < 0.5)
                    besieged.daemon.start()
                    until(lambda: besieged.client.wait_connected(1.0), "the witness client to attach again")
                elif one is not None:
                    _attack(chance, one, what, [grant for each in hostile for grant in each.grants])
                    if what == "leave":
                        hostile.remove(one)
            except (TensordError, OSError):
                # The daemon refuses, or has hung up.
                if one is not None:
                    hostile.remove(one)
                    one.close()
            if not step % CHECK_EVERY:
                besieged.check()
    finally:
        for each in hostile:
            each.close()
    for each_key in words.KEYS:
        _read(besieged, each_key, sound=not in_place)
    besieged.settle()


def _joined(besieged: Besieged, ring_bytes: int, *, in_place: bool) -> Hostile:
    raw = RawClient(besieged.daemon.socket)
    try:
        if in_place:
            raw.ask(lambda number: messages.OpenRing(number))
            return Hostile(raw, os.dup(raw.fds[-1]))
        fd = create_inbox(ring_bytes + PREFIX_BYTES_MAX)
        raw.ask(lambda number: messages.OpenInbox(number, ring_bytes + PREFIX_BYTES_MAX), (fd,))
        return Hostile(raw, fd)
    except BaseException:
        raw.close()
        raise


def _attack(chance: random.Random, one: Hostile, what: str, grants: list[tuple[int, int, int]]) -> None:
    lane_fd = one.raw.fds[2]
    match what:
        case "put":
            _put(chance, one, grants)
        case "ask":
            sizes = [
                chance.choice(_SIZES[:9] if chance.random() < 0.9 else _SIZES) for _ in range(chance.choice([1, 4]))
            ]
            lent = one.raw.ask(lambda number: messages.AskForGrants(number, sizes))
            while not isinstance(lent, messages.GrantsLent):
                lent = one.raw.hear()
            one.grants += [(number, offset, size) for number, offset, size, *_ in lent.places()]
        case "return":
            known = [number for number, *_ in grants]
            some = [chance.choice([*known, 0, 1, 77, (1 << 32) - 1]) for _ in range(chance.choice([0, 1, 3]))]
            one.raw.channel.send(messages.ReturnGrants(some), timeout_s=5.0)
            one.grants = [grant for grant in one.grants if grant[0] not in some]
        case "bell":
            one.raw.channel.send(messages.Doorbell(), timeout_s=5.0)
        case "head":
            head = chance.choice([one.number, one.number + 1, one.number + QUEUE_RECORDS + 1, *_NUMBERS])
            os.pwrite(lane_fd, head.to_bytes(8, "little"), SUBMITTED_AT * 8)
        case "waits":
            os.pwrite(lane_fd, chance.choice([one.number, *_NUMBERS]).to_bytes(8, "little"), WAITS_AT * 8)
        case "bytes":
            size = chance.choice([8, 160, 4096])
            os.pwrite(lane_fd, chance.randbytes(size), chance.randrange(QUEUE_AT, LANE_BYTES - 4096))
        case "words":
            _overwrite(chance, lane_fd)
        case "cut" if chance.random() < 0.2:
            os.ftruncate(lane_fd, chance.choice(_LANE_SIZES))
        case "leave":
            one.close()
        case _:
            pass


def _overwrite(chance: random.Random, fd: int) -> None:
    """Writes words that may be span ids or positions into the lane's header, pins or log, or across their borders."""
    first = chance.choice([0, 0, 1, 2, 8, 16, LANE_HEADER_WORDS, LANE_HEADER_WORDS + LANE_WORDS, LANE_BYTES // 8 - 1])
    size = chance.choice([1, 1, 8, 600, LANE_WORDS])
    drawn = (chance.choice([*_WORDS, 1 << 48 | chance.randrange(1, 2000), chance.getrandbits(64)]) for _ in range(64))
    content = b"".join(word.to_bytes(8, "little") for word in islice(drawn, size))
    os.pwrite(fd, content * (size // 64 or 1), first * 8 + chance.choice([0, 0, 0, 3]))


def _put(chance: random.Random, one: Hostile, grants: list[tuple[int, int, int]]) -> None:
    """Writes a payload into a place, and adds a record. Most of its fields are valid."""
    if not one.grants:
        return
    grant, offset, size = chance.choice(one.grants)
    stored, tree_bytes = words.stored_tree(chance)
    stored = stored[: max(0, size - SPAN_HEADER_BYTES)]
    os.pwrite(one.memory_fd, stored, offset + SPAN_HEADER_BYTES)
    one.number += 1
    fields = [
        one.number, chance.choice([*words.KEYS, key(1)]), offset, len(stored), 0, 0, NO_KEY, 1.0, 0.0, grant,
        min(tree_bytes, len(stored)), 1, 0, 0, 0,
    ]  # fmt: skip
    while chance.random() < 0.3:
        at = chance.randrange(_FIELDS)
        match at:
            case 1 | 6:
                fields[at] = chance.choice([NO_KEY, chance.randbytes(32), chance.choice(words.KEYS)])
            case 7 | 8:
                fields[at] = chance.choice(_TIMES)
            case _:
                most = (1 << 64) - 1 if at < 6 else (1 << 32) - 1
                near = [max(0, int(fields[at]) + step) for step in (-64, -1, 1, 64)]  # type: ignore[call-overload]
                others = [number for each in grants for number in each]
                fields[at] = chance.choice([*near, *others, *_NUMBERS, most]) & most
    place = QUEUE_AT + (one.number - 1) % QUEUE_RECORDS * RECORD_BYTES
    os.pwrite(one.raw.fds[2], RECORD.pack(*fields), place)
    os.pwrite(one.raw.fds[2], one.number.to_bytes(8, "little"), SUBMITTED_AT * 8)
    if chance.random() < 0.5:
        one.raw.channel.send(messages.Doorbell(), timeout_s=5.0)


def _read(besieged: Besieged, name: bytes, *, sound: bool) -> None:
    """Reads what a hostile client has put: a payload, or a miss. `sound`: it was checked, so it is whole."""
    for verify in (False, True):
        try:
            with besieged.client.get(name, verify=verify) or besieged.client.get_many([]) as lease:
                _ = getattr(lease, "tree", None)
        except Corrupt:
            assert not sound, f"{name.hex()} is corrupt"
