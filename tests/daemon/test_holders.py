"""Counting who holds what, against a plain Counter."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.actors.store import StoreActor
from tensord.daemon.actors.words import HoldersChanged
from tensord.daemon.holders import Holders

from ..daemon_process import PATIENCE_S

# Ids of clients' making: small ones that collide, and the largest there are.
SPANS = st.one_of(st.integers(1, 9), st.integers(2**64 - 3, 2**64 - 1))
LANES = st.lists(st.lists(SPANS, max_size=6), max_size=4)


@given(found=st.dictionaries(SPANS, st.integers(1, 5), max_size=4), rounds=st.lists(LANES, max_size=4))
def test_changes_are_all_that_is_told_and_a_lane_counts_once(
    found: dict[int, int], rounds: list[list[list[int]]]
) -> None:
    holders = Holders(np.array([*found], np.uint64), np.array([*found.values()], np.uint64))
    told = dict(found)
    for lanes in rounds:
        counted = Counter(span for lane in lanes for span in set(lane))
        changed = holders.changes([np.array(lane, np.uint64) for lane in lanes])
        assert all(told.get(span, 0) != now for span, now in changed), "what has not changed was told"
        told.update(changed)
        assert {span: now for span, now in told.items() if now} == counted
        assert len(holders) == len(counted)
    assert all(type(span) is type(now) is int for span, now in told.items())


def test_more_than_can_be_told_stays_at_the_most() -> None:
    holders = Holders(np.empty(0, np.uint64), np.empty(0, np.uint64))
    many = [np.array([7], np.uint64)] * ((1 << 16) + 5)
    assert holders.changes(many) == [(7, (1 << 16) - 1)]
    assert holders.changes(many[1:]) == []


def test_a_count_that_fails_is_said_and_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    none = np.empty(0, np.uint64)
    memory: Any = SimpleNamespace(
        ring=memoryview(b""),
        index=SimpleNamespace(held=lambda: (none, none)),
        pins_by_lane=lambda: [np.array([7], np.uint64)],
    )
    config: Any = SimpleNamespace(queues=SimpleNamespace(store_inbox_max=9), limits=SimpleNamespace(tree_depth_max=9))

    def fails(_: Holders, pinned: Sequence[Any]) -> list[tuple[int, int]]:
        raise MemoryError(f"too many lanes, {len(pinned)}")

    async def counts() -> None:
        store: Any = None
        actor = StoreActor(store, memory, config, clock=time.monotonic, tell_watchers=lambda _: None)
        with monkeypatch.context() as patched:
            patched.setattr(Holders, "changes", fails)
            actor._count_holders()
            assert await actor.inbox.take(9, PATIENCE_S) == [HoldersChanged([])]
        logged = capsys.readouterr()
        assert "too many lanes, 1" in logged.out + logged.err
        await actor._show_holders([])
        assert actor._holders_at < time.monotonic() + PATIENCE_S
        actor._count_holders()
        assert await actor.inbox.take(9, PATIENCE_S) == [HoldersChanged([(7, 1)])]

    asyncio.run(counts())
