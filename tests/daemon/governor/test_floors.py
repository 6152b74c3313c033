"""Queueing floors: what reported requests forbid, for how long, and which devices are remembered."""

from __future__ import annotations

import pytest

from tensord.daemon.forms.events import Tick
from tensord.ipc.messages import control as messages

from .stand import GPU, MIB, Stand, with_clients


def known() -> Stand:
    stand = Stand()
    stand.join(1)
    stand.sample(0.5)
    return stand


def blocks(stand: Stand) -> int:
    stand.do(Tick())  # status is as of the last event
    return int(stand.device()["floor_blocks"])


@pytest.mark.parametrize(
    ("seconds", "a_second", "service_s", "held", "last_s", "floor"),
    [
        (60, 1, 2.0, 4, 0.0, 10),  # 60 in 59 s, of 2 s and 4 blocks each: 8.14 blocks and the margin
        (1, 100, 2.0, 10, 0.0, 575),  # the rate is that of 4 s
        (30, 2, 0.5, 7, 30.0, 5),  # 60 in 59 s: 4.09 with the margin
        (30, 2, 0.5, 7, 45.0, 3),  # 30 of them are in the window
        (30, 2, 0.5, 7, 91.0, 0),
        (60, 3, 0.0, 7, 0.0, 0),
    ],
)
def test_the_floor_is_littles_law_over_the_window(
    seconds: int, a_second: int, service_s: float, held: int, last_s: float, floor: int
) -> None:
    stand = known()
    for _ in range(seconds):
        stand.now += 1
        stand.say(1, messages.RequestsArrived(GPU, a_second))
        for _ in range(a_second):
            stand.say(1, messages.RequestCompleted(GPU, service_s, held))
    stand.now += last_s
    assert blocks(stand) == floor


def test_a_devices_floor_keeps_its_entries_and_ends_when_its_requests_do() -> None:
    stand = with_clients(block_bytes=MIB)
    stand.open(1)
    for number in range(10):
        stand.register(1, number, MIB)
    stand.serve_requests()
    stand.sample(0.97)
    assert stand.device()["floor_blocks"] == 10
    assert stand.orders() == []
    stand.pass_time(120)
    stand.sample(0.97)
    assert stand.device()["floor_blocks"] == 0
    assert sum(len(order.keys) for order in stand.orders()) == 10


def test_requests_of_made_up_devices_are_not_counted() -> None:
    stand = with_clients()
    for device in ("dev0", GPU):
        stand.say(1, messages.RequestsArrived(device, 1))
    assert stand.status()["counters"]["refused"] == {"NoGauge": 2} and stand.answers[1] == [], "silently"
    stand.sample(0.5)
    stand.say(1, messages.RequestsArrived(GPU, 1))
    assert [row["device"] for row in stand.status()["devices"]] == [GPU]
    stand.pass_time(70)
    stand.sample(0.5)
    assert stand.status()["devices"] == []
