"""What belongs to its process is neither pickled nor copied, and says what to do: pins, claims, connections."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.testing import FakeCard

from ..client.device.card import CARD, key, watching

NAMESPACE = tensord.Namespace(model="m", revision="r", dtype="f", processor="p")
TOKENS = np.arange(64, dtype=np.uint32)


@pytest.fixture
def client(card: FakeCard) -> Iterator[tensord.Client]:
    with watching(card) as daemon:
        client = daemon.start().client()
        daemon.until(lambda status: CARD in str(status["governor"]), "the card to be known")
        yield client


def matched(client: tensord.Client) -> Any:
    prefixes = tensord.PrefixCache(client, NAMESPACE, block_tokens=16)
    prefixes.put(TOKENS, [tensord.NormalLayer(np.zeros((1, 1, len(TOKENS), 1)))], wait=True)
    return prefixes.match(TOKENS)


def graph() -> tensord.AgentStepGraph:
    return tensord.AgentStepGraph([tensord.AgentStep("planner")])


OPENED: dict[str, Callable[[tensord.Client], Any]] = {
    "Batch": lambda client: client.get_many([key(1)]),
    "Claim": lambda client: client.claim(key(2)),
    "Client": lambda client: client,
    "DeviceReservation": lambda client: client.reserve_device(CARD, 4096),
    "Lease": lambda client: client.get(key(1)),
    "PrefixCache": lambda client: tensord.PrefixCache(client, NAMESPACE),
    "PrefixMatch": matched,
    "Reservation": lambda client: client.reserve(tensord.Spec((3,), "uint8")),
    "RingReader": lambda client: client.ring(),
    "Subscription": lambda client: client.on_mode(print),
    "VisualCache": lambda client: tensord.VisualCache(client, NAMESPACE),
    "Workflow": lambda client: client.workflow("of one step", graph()),
}


def test_what_belongs_to_this_process_is_neither_pickled_nor_copied(client: tensord.Client) -> None:
    client.put(key(1), np.arange(5), wait=True)
    for name, open_it in OPENED.items():
        opened = open_it(client)
        assert type(opened).__name__.endswith(name)
        copies: list[Callable[[Any], object]] = [pickle.dumps, copy.deepcopy]
        for copied in copies:
            with pytest.raises(TypeError, match=r"of this process|in this process|for this process") as refused:
                copied(opened)
            assert "cannot be pickled or copied: " in str(refused.value)


def test_what_a_put_came_to_and_a_namespace_are_pickled(client: tensord.Client) -> None:
    put = client.put(key(1), np.arange(5), wait=True)
    assert pickle.loads(pickle.dumps(put)).state == "stored"
    assert pickle.loads(pickle.dumps(NAMESPACE)) == NAMESPACE
