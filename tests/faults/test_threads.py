"""One client, many threads: every get is right under eviction, every pin is released, however its view ends."""

from __future__ import annotations

import gc
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from random import Random
from typing import Any

from tensord.errors import StoreFull

from ..daemon_process import MIB, PATIENCE_S, Daemon
from .payloads import is_payload, key, payload

NUMBERS = 200  # of entries: several times what the ring holds
SIZES = [8 << 10, 40 << 10, 96 << 10]


def test_gets_are_right_while_other_threads_put_and_release() -> None:
    with Daemon(ring_bytes=4 * MIB) as small:
        client, hits = small.start().client(), count()
        # What falls out at one end was got by another thread, most of the time.
        shared: deque[tuple[int, Any]] = deque(maxlen=10)

        def works(random: Random) -> None:
            for _ in range(100):
                number = random.randrange(NUMBERS)
                put = client.put(key(number), payload(number, SIZES[number % 3]), timeout_s=PATIENCE_S)
                # What is pinned and on its way may fill the ring for a moment; then it says so.
                assert put.state in ("sent", "stored", "existed") or isinstance(put.error, StoreFull), put
                numbers = random.sample(range(NUMBERS), 4)
                leases = [client.get(key(number)) for number in numbers[:2]]
                with client.get_many([key(number) for number in numbers[2:]]) as batch:
                    leases += batch
                    held = [(number, lease.tree) for number, lease in zip(numbers, leases, strict=True) if lease]
                    del leases
                for known, view in (*held, *list(shared)[:3]):
                    assert is_payload(view, known)
                    next(hits)
                # Not of the batch: one of its views keeps all of them in the ring.
                shared.extend(each for each in held if each[0] in numbers[:2])

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(works, Random(seed)) for seed in range(4)]:
                done.result(2 * PATIENCE_S)
        assert next(hits) > 50
        assert small.store("evictions")["capacity"] > 20
        shared.clear()
        gc.collect()
        small.until(lambda s: not s["pins"], "every pin to be released")
        assert small.store("found_corrupt") == 0
