"""A read counts for the put that follows it, and not for an earlier one, though the daemon reads lanes now and then."""

from __future__ import annotations

import numpy as np
import pytest

import tensord

from ..daemon_process import PATIENCE_S, Daemon
from ..memory_bench import key

PICTURE_BYTES = 1 << 20
RING_BYTES = 16 << 20


@pytest.mark.parametrize(("policy", "turns"), [("hazard", 10), ("lru", 20)])
def test_the_coldest_entry_that_is_read_outlives_the_put_that_follows_at_once(policy: str, turns: int) -> None:
    """After a round of such reads, the learned policy may know that the one just read is the last to come again."""
    picture = {"x": np.zeros(PICTURE_BYTES - 4096, np.uint8)}
    with (
        Daemon(policy=policy, ring_bytes=RING_BYTES) as daemon,
        tensord.Client(daemon.start().socket, timeout_s=PATIENCE_S) as client,
    ):
        numbers = list(range(RING_BYTES // PICTURE_BYTES))
        for number in numbers:
            assert client.put(key(number), picture, wait=True).state == "stored"
        there = [number for number in numbers if client.contains(key(number))]
        for turn in range(turns):
            read, *there = there
            lease = client.get(key(read))
            assert lease is not None
            lease.release()
            del lease
            new = 1000 + turn
            assert client.put(key(new), picture, wait=True).state == "stored"
            assert client.contains(key(read)), f"turn {turn}: it was read, and went"
            there = [number for number in (*there, read, new) if client.contains(key(number))]


@pytest.mark.parametrize("policy", ["hazard", "lru"])
def test_an_entry_that_just_fitted_is_not_the_next_to_go_although_all_others_were_read_before_its_put(
    policy: str,
) -> None:
    picture = {"x": np.zeros(PICTURE_BYTES - 4096, np.uint8)}
    with (
        Daemon(policy=policy, ring_bytes=RING_BYTES) as daemon,
        tensord.Client(daemon.start().socket, timeout_s=PATIENCE_S) as client,
    ):
        for number in range(2 * RING_BYTES // PICTURE_BYTES):
            assert client.put(key(number), picture, wait=True).state == "stored"
        there = [number for number in range(2 * RING_BYTES // PICTURE_BYTES) if client.contains(key(number))]
        for turn in range(20):
            # Room for one entry.
            client.evict(key(there.pop()))
            for number in there:
                lease = client.get(key(number))
                assert lease is not None
                lease.release()
                del lease
            fits, needs_room = 1000 + turn, 2000 + turn
            assert client.put(key(fits), picture, wait=True).state == "stored"
            assert client.put(key(needs_room), picture, wait=True).state == "stored"
            assert client.contains(key(fits)), f"turn {turn}: it was put last but one, and went"
            there = [number for number in (*there, fits, needs_room) if client.contains(key(number))]
