"""An actor's work loop: bounded turns, jobs and messages in alternation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tensord.daemon.actors.mailbox import Mailbox
from tensord.daemon.actors.pump import TURN_S, Pump


class Clock:
    """Literal time: each item takes `item_s` seconds."""

    def __init__(self, item_s: float = 0.0) -> None:
        self.now = 0.0
        self.item_s = item_s

    def __call__(self) -> float:
        return self.now


def pump_of(count: int, clock: Clock, also: Callable[[int], None] = lambda _: None) -> tuple[Pump[int], list[int]]:
    """A pump with `count` messages waiting, and the list of those that were received."""
    inbox: Mailbox[int] = Mailbox(count + 1)
    received: list[int] = []

    def receive(message: int) -> None:
        received.append(message)
        clock.now += clock.item_s
        also(message)

    for number in range(count):
        inbox.tell_now(number)
    return Pump(inbox, receive, clock), received


def job(done: list[str], name: str, slices: int) -> Iterator[None]:
    for number in range(slices):
        done.append(f"{name}{number}")
        yield


def test_a_turn_ends_when_its_time_is_used() -> None:
    pump, received = pump_of(50, Clock(item_s=TURN_S / 4))
    pump.turn()
    assert received == [0, 1, 2, 3]
    pump.turn()
    assert len(received) == 8


def test_jobs_take_turns_with_each_other_and_with_messages() -> None:
    done: list[str] = []
    pump, _ = pump_of(2, Clock(), lambda number: done.append(str(number)))
    pump.begin(job(done, "a", 3))
    pump.begin(job(done, "b", 2))
    pump.turn()
    assert done == ["0", "a0", "1", "b0", "a1", "b1", "a2"]
    assert not pump.busy
