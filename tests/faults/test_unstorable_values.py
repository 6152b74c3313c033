"""A value that cannot be stored costs each process its own computation, and nothing else: nobody waits for it in vain.

As in test_compute_once.py, a computation says that it has begun, and goes on when the test says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.errors import UnsupportedLeaf

from ..daemon_process import PATIENCE_S, Daemon
from ..processes import Child, Stage
from .payloads import key

KEY = key(1)
RING_BYTES = 4 << 20


class Unknown:
    """A type that no payload has."""


VALUES: dict[str, tuple[Callable[[], Any], int, str]] = {
    "more nodes than a tree has": (lambda: [[{}] for _ in range(20_000)], 0, "ObjectTooLarge"),
    "a header of more than a mebibyte": (lambda: ["x" * 100] * 20_000, 0, "ObjectTooLarge"),
    "larger than the ring": (lambda: np.zeros(RING_BYTES, np.uint8), 0, "ObjectTooLarge"),
    "larger than object_bytes_max": (lambda: np.zeros(3 << 20, np.uint8), 0, "ObjectTooLarge"),
    "a type that no payload has": (lambda: {"a": Unknown()}, 0, "UnsupportedLeaf"),
    "more tokens than the store may have": (lambda: np.zeros(9), 1000, "LimitReached"),
}


def asks(stage: Stage, socket: Path, case: str) -> tuple[Any, ...]:
    """Asks for the key twice. The computation says so, and then goes on."""
    made, tokens, _ = VALUES[case]
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tensord").addHandler(handler)

    def compute() -> Any:
        stage.tell("computing")
        stage.hear()
        return made()

    with tensord.Client(socket, timeout_s=PATIENCE_S) as client:
        for _ in range(2):
            try:
                client.get_or_compute(KEY, compute, tokens=tokens, timeout_s=PATIENCE_S)
            except UnsupportedLeaf:
                continue
        # The daemon's answer to a put comes in the link's thread; that of a later request comes after it.
        client.evict(bytes(32))
        assert client.tally.waited == 0
        return client.tally.computed, dict(client.tally.not_stored), lines


@pytest.fixture
def small() -> Iterator[Daemon]:
    """Claims outlast any test."""
    limits: dict[str, Any] = {"limits_claim_s": 60, "limits_claim_s_max": 120, "limits_object_bytes_max": 2 << 20}
    with Daemon(ring_bytes=RING_BYTES, max_tokens=100, **limits) as running:
        yield running.start()


@pytest.mark.parametrize("case", VALUES)
def test_nobody_waits_for_a_value_that_cannot_be_stored(case: str, small: Daemon) -> None:
    *_, code = VALUES[case]
    with ExitStack() as stack:
        first = stack.enter_context(Child(asks, small.socket, case))
        assert first.hear() == "computing"
        others = [stack.enter_context(Child(asks, small.socket, case)) for _ in range(5)]
        small.until(lambda status: status["store"]["claims_waiting"] == 5, "five to wait")
        first.tell("go on")
        # All six compute at the same time, none behind another: the first one for the second time.
        assert [child.hear() for child in (first, *others)] == ["computing"] * 6
        for child in (first, *others):
            child.tell("go on")
        assert [child.hear() for child in others] == ["computing"] * 5
        for child in others:
            child.tell("go on")
        for child in (first, *others):
            computed, not_stored, lines = child.hear()
            assert not_stored == {code: 2}
            assert computed == 2
            [line] = [line for line in lines if KEY[:8].hex() in line]
            assert code in line
    store = small.status()["store"]
    assert (store["claims_granted"], store["claims_handed_over"], store["claims_held"]) == (1, 0, 0)
    assert store["claims_unstorable"] == {code: 1}
    assert store["refusals"][code] >= 1
