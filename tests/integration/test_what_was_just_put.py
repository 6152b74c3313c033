"""What was just put is there, whatever else is put beside it: with clients that ask for places ahead of need."""

from __future__ import annotations

import numpy as np
import pytest

import tensord
from tensord.daemon.replacement import POLICIES

from ..daemon_process import MIB, PATIENCE_S, Daemon
from ..faults.payloads import key

TOKENS = 1000


@pytest.mark.parametrize("policy", POLICIES)
def test_a_large_put_is_there_after_the_next_one_though_sequences_of_many_blocks_fill_the_ring(policy: str) -> None:
    with Daemon(ring_bytes=64 * MIB, policy=policy) as daemon, daemon.start().client(timeout_s=PATIENCE_S) as client:
        prefixes = tensord.PrefixCache(
            client, client.current(tensord.Namespace(model="m", revision="1", dtype="f8", processor="p"))
        )
        layers = [tensord.NormalLayer({"k": np.zeros((1, 1, TOKENS, 4))})]
        for number in range(130):
            for sequence in range(4 * number, 4 * number + 4):
                prefixes.put(np.arange(TOKENS, dtype=np.uint32) + 5000 * sequence, layers, wait=True)
            assert client.put(key(number), np.full(MIB, number, np.uint8), wait=True).state == "stored"
            assert not number or client.contains(key(number - 1)), number
