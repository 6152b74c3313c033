"""What a client does is done in its order, though records and messages go separate ways."""

from __future__ import annotations

import numpy as np

from ..daemon_process import Daemon
from ..memory_bench import key


def test_a_put_comes_after_an_eviction_whose_answer_nobody_waits_for(daemon: Daemon) -> None:
    client = daemon.client()
    for number in range(50):
        assert client.put(key(1), np.full(4, number), wait=True).state == "stored"
        client.link.puts.evict([key(1)])
        assert client.put(key(1), np.full(4, -number - 1), wait=True).state == "stored"
        lease = client.get(key(1))
        assert lease is not None and lease.tree[0] == -number - 1
        assert client.evict(key(1)) == 1
