"""Queues of lanes: a damaged one ends with its connection, and a burst of records wakes a daemon that naps."""

from __future__ import annotations

import os
from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tensord.daemon.actors.queues import Queues
from tensord.errors import BadMessage
from tensord.shm.lanes.records import (
    AWAKE,
    NAP_RECORDS,
    NAPS,
    NO_KEY,
    SLEEPS,
    SUBMITTED_AT,
    SubmissionReader,
    Submissions,
)
from tensord.shm.ring.layout import QUEUE_AT, QUEUE_BYTES, RECORD_BYTES

from ...memory_bench import lane_file


class Stand:
    """One client's queue. The core refuses each record as none of the client's."""

    def __init__(self) -> None:
        self.fd = lane_file()
        self.taken = 0
        self.hung_up: list[str] = []
        words = memoryview(array("Q", [0]))
        memory = SimpleNamespace(settled=words, refusals=words)
        self.queues = Queues(
            cast(Any, memory),
            cast(Any, None),
            submitted=self._submitted,
            is_lent=lambda *place: False,
            ring=lambda client: None,
            hang_up=lambda client, reason: self.hung_up.append(reason),
        )
        lane = SimpleNamespace(place=0, queue=SubmissionReader(self.fd))
        self.queues.attached(1, 0, cast(Any, lane))
        self.queues.writes_in_place(1)

    def _submitted(self, client: int, records: memoryview, errors: object) -> int:
        self.taken += 1
        assert self.taken < 9, "a damaged queue is carried out further"
        raise BadMessage("the queue is damaged")

    def head(self, number: int) -> None:
        os.pwrite(self.fd, number.to_bytes(8, "little"), SUBMITTED_AT * 8)


def test_a_queue_with_a_huge_head_ends_at_its_first_damage_though_more_is_asked_then() -> None:
    stand, done = Stand(), []
    stand.head(1 << 62)
    stand.queues.after_added(1, lambda: done.append("asked"))
    assert (stand.taken, len(stand.hung_up), done) == (1, 1, ["asked"])
    assert not stand.queues.waiting and not stand.queues.turn()


def test_a_truncated_queue_keeps_nobody_busy() -> None:
    stand = Stand()
    stand.head(1 << 62)
    os.ftruncate(stand.fd, QUEUE_AT + RECORD_BYTES // 2)
    assert not stand.queues.turn()
    assert not stand.queues.waiting


@pytest.mark.parametrize(
    ("asleep", "first"), [(AWAKE, None), (NAPS, NAP_RECORDS), (SLEEPS, 1)], ids=["awake", "naps", "sleeps"]
)
def test_a_client_rings_once_for_a_burst_and_again_when_the_daemon_has_carried_it_out(
    asleep: int, first: int | None
) -> None:
    words, queue = memoryview(array("Q", bytes(8 * (SUBMITTED_AT + 1)))), memoryview(bytearray(QUEUE_BYTES))
    settled, state = memoryview(array("Q", [0])), memoryview(array("Q", [asleep]))
    submissions = Submissions(words, SUBMITTED_AT, queue, settled, 0, state)
    rung = []
    for number in range(1, 4 * NAP_RECORDS + 1):
        assert submissions.add(NO_KEY, 0, 64, 0, 0, NO_KEY, 0.0, 0.0, 0, 0, 0, 0, 0, 0) == number
        if submissions.rings:
            rung.append(number)
            submissions.rang()
        if number == 2 * NAP_RECORDS:
            settled[0] = number
    assert rung == ([] if first is None else [first, 2 * NAP_RECORDS + first])
