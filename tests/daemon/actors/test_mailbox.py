"""An actor's inbox and work loop: a flood delays another sender by one message a turn; jobs and messages alternate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from tensord.daemon.actors.mailbox import TURN_S, Mailbox, Pump, Sender

LOUD: Sender = (1000, 1)
QUIET: Sender = (1000, 3)


async def flood(inbox: Mailbox[str], sender: Sender, count: int) -> None:
    for number in range(count):
        await inbox.tell(f"flood {sender[1]} {number}", sender)


async def turns(count: int = 5) -> None:
    """Lets every task that can go on do so."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_sender_that_waits_for_room_delays_no_other_sender() -> None:
    inbox: Mailbox[str] = Mailbox(4)
    flooding = asyncio.create_task(flood(inbox, LOUD, 100))
    await turns()
    assert len(inbox) == 4 and not flooding.done()
    # It returns at once: nothing has been taken meanwhile.
    await inbox.tell("quiet", QUIET)
    assert inbox.take(2) == ["flood 1 0", "quiet"]
    await turns()
    assert len(inbox) == 4, "the flood fills what it may, and no more"
    flooding.cancel()


async def test_messages_of_one_sender_keep_their_order_whether_or_not_they_wait() -> None:
    inbox: Mailbox[str] = Mailbox(2)
    telling = asyncio.create_task(flood(inbox, LOUD, 20))
    taken: list[str] = []
    while len(taken) < 20:
        await inbox.wait()
        taken += inbox.take(3)
    await telling
    assert taken == [f"flood 1 {number}" for number in range(20)]
    inbox.tell_now("x", LOUD)
    inbox.tell_now("left", LOUD)
    assert inbox.take() == ["x", "left"]


async def test_the_actors_own_messages_come_first_and_never_wait() -> None:
    inbox: Mailbox[str] = Mailbox(2)
    await flood(inbox, LOUD, 2)
    for number in range(5):
        inbox.tell_now(f"own {number}")
    assert inbox.take(6) == [*(f"own {number}" for number in range(5)), "flood 1 0"]


# ---- the work loop


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
