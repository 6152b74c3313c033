"""A damaged header of a span: the entry is gone, and no entry is kept as what it never was."""

from __future__ import annotations

import os
import struct

import pytest

from tensord.shm.ring import segments

from ..daemon_process import MIB, Daemon
from ..faults.payloads import is_payload, key, payload

TOKENS_AT, TTL_AT, CREATED_AT, OWNER_AT, COST_AT, NUMBER_AT, PARENT_AT, EXPIRES_AT = 56, 64, 72, 80, 88, 96, 104, 152


@pytest.mark.parametrize(
    ("at", "value"),
    [
        *((at, 1 << 61) for at in (TOKENS_AT, TTL_AT, CREATED_AT, OWNER_AT, COST_AT, NUMBER_AT, PARENT_AT, EXPIRES_AT)),
        *((at, 3) for at in (TTL_AT, EXPIRES_AT)),
    ],
)
def test_an_entry_whose_header_is_damaged_anywhere_is_not_read_after_a_restart(at: int, value: int) -> None:
    with Daemon(ring_bytes=2 * MIB, policy="lru") as daemon:
        client = daemon.start().client()
        for number in range(2):
            put = client.put(key(number), payload(number), wait=True, tokens=5, ttl_s=1e6, cost_ms=2.0)
            assert put.state == "stored"
        daemon.kill()
        with (segments.SHM_FOLDER / f"tensord.{daemon.instance}.ring").open("r+b", buffering=0) as ring:
            start = ring.read(MIB).index(key(0)) - 16
            os.pwrite(ring.fileno(), struct.pack("Q", value), start + at)
        daemon.start()
        fresh = daemon.client()
        assert fresh.get(key(0)) is None
        other = fresh.get(key(1))
        assert other is not None and is_payload(other.tree, 1)
        # A damaged time of expiry may be over.
        daemon.until(lambda status: status["store"]["entries"] == 1, "the scrub finds the damage")
