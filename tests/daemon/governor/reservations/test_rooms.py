"""Room for an operator: who is asked when, what each freed by the gauge, and what the answer says of it."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from tensord.daemon.governor.forms.events import NeighbourAnswered
from tensord.daemon.governor.forms.limits import NeighbourPlace
from tensord.daemon.governor.rooms import SETTLE_S
from tensord.ipc.messages import control as messages

from ..stand import GPU, MIB, TOTAL, Stand, refused, with_clients

VLLM = NeighbourPlace("vllm", "127.0.0.1", 8000)
OLLAMA = NeighbourPlace("ollama", "127.0.0.1", 11434)
ELSEWHERE = NeighbourPlace("comfyui", "127.0.0.1", 8188, "0000:66:00.0")
BOTH = (VLLM, OLLAMA)
OPERATOR, ENGINE = 2, 1


class Site:
    """A card of 1,000 MiB of which `used` are used, and an operator (client 2). Readings are 0.25 s apart."""

    def __init__(self, used: int = 900, neighbours: tuple[NeighbourPlace, ...] = BOTH, **limits: Any):
        self.stand: Stand = with_clients(neighbours=neighbours, **limits)
        self.used = used
        self.sample()

    def sample(self, used: int | None = None, **more: Any) -> None:
        self.used = self.used if used is None else used
        self.stand.sample(self.used * MIB, **{"after_s": 0.25, **more})

    def make_room(self, size: int, for_s: float = 600.0, wait_s: float = 60.0) -> int:
        request = self.stand.begin(OPERATOR, messages.MakeRoom, GPU, size * MIB, for_s, wait_s)
        self.stand.settle()
        return request

    def answer(self, request: int) -> Any:
        return self.stand.answer(OPERATOR, request)

    @property
    def asked(self) -> list[NeighbourPlace]:
        return [each.place for each in self.stand.neighbours_asked]

    def answered(self, outcome: Literal["done", "busy", "failed"], why: str = "") -> None:
        """The neighbour that was asked last has answered."""
        self.stand.do(NeighbourAnswered(self.stand.neighbours_asked[-1].number, outcome, why))

    def settle(self) -> None:
        """Readings without a change, until a step must be over."""
        for _ in range(int(SETTLE_S / 0.25) + 1):
            self.sample()

    def play(self, *events: Any) -> None:
        """One after another: a reading of so many MiB, an answer of the neighbour that was asked last, or a step that
        must be over."""
        for event in events:
            if event == "settle":
                self.settle()
            elif isinstance(event, int):
                self.sample(event)
            else:
                self.answered(*event)


def steps(answer: messages.RoomMade) -> list[tuple[str, str, int]]:
    return [(step.who, step.outcome, step.freed_bytes // MIB) for step in answer.steps]


NOTHING = ("cached tensors", "nothing", 0)
NO_ENTRY = (*NOTHING, "no entry is cached on the card")
BUSY, FAILED = "3 requests are under way", "no answer within 20 s"
VAIN = "it accepted the request, and the card's gauge did not fall"


@pytest.mark.parametrize(
    ("events", "asked", "made", "expected"),
    [
        ([300], 0, True, [("cached tensors", "freed", 600, "")]),
        ([900, 890], 1, None, []),
        ([900, ("done",), 700], 1, None, []),
        (
            [900, 890, ("done",), 700, "settle", ("done",), 450],
            2,
            True,
            [NO_ENTRY, (VLLM.name, "freed", 200, ""), (OLLAMA.name, "freed", 250, "")],
        ),
        (
            [900, ("busy", BUSY), ("done",), 300],
            2,
            True,
            [NO_ENTRY, (VLLM.name, "left alone", 0, BUSY), (OLLAMA.name, "freed", 600, "")],
        ),
        (
            [900, ("failed", FAILED), "settle", ("failed", "closed"), 200],
            2,
            True,
            [NO_ENTRY, (VLLM.name, "failed", 0, FAILED), (OLLAMA.name, "failed", 700, "closed")],
        ),
        (
            [900, ("done",), "settle", ("done",), 800, "settle"],
            2,
            False,
            [NO_ENTRY, (VLLM.name, "nothing", 0, VAIN), (OLLAMA.name, "freed", 100, "")],
        ),
        ([900, 300, ("done",), "settle"], 1, True, [NO_ENTRY, (VLLM.name, "freed", 600, "")]),
    ],
    ids=["enough", "no answer", "falls", "both", "busy", "failed", "in vain", "other means"],
)
def test_neighbours_are_asked_in_order_one_at_a_time_until_there_is_room(
    events: list[Any], asked: int, made: bool | None, expected: list[tuple[str, str, int, str]]
) -> None:
    """A room of 500 MiB on a card of which 100 MiB are free: the events, and what has come of them."""
    site = Site()
    request = site.make_room(500)
    site.play(*events)
    answer = site.answer(request)
    assert site.asked == [*BOTH][:asked]
    assert (answer and answer.made) == made
    if answer is None:
        return
    assert [(*step, told.why) for step, told in zip(steps(answer), answer.steps, strict=True)] == expected
    assert answer.missing_bytes == (0 if made else 300 * MIB)
    reserved = [row["reserved_bytes"] for row in site.stand.status()["devices"]]
    assert reserved == ([500 * MIB] if made else [])
    logged = [each for each in site.stand.logged if each.event == "neighbour asked for memory"]
    of_neighbours = [(s.who, s.why, s.outcome in ("failed", "nothing")) for s in answer.steps[1:]]
    assert [(e.fields["neighbour"], e.fields.get("why", ""), e.level == "warning") for e in logged] == of_neighbours


def test_a_reading_that_began_before_the_time_to_settle_was_over_says_not_all_of_what_was_freed() -> None:
    site = Site()
    site.make_room(500)
    site.sample()
    site.stand.now += 1
    answered_at = site.stand.now
    site.answered("failed", "no answer")
    site.sample(after_s=SETTLE_S, began_at=answered_at + SETTLE_S - 0.01)
    assert site.asked == [VLLM]


def test_room_that_is_free_is_held_for_room_s_max_at_most_and_nobody_is_asked() -> None:
    site = Site(used=100, room_s_max=90.0, reserve_s_max=60.0)
    answer = site.answer(site.make_room(800))
    assert answer.made and answer.lasts_s == 90.0 and answer.steps == []
    assert site.asked == [] and site.stand.device()["reserved_bytes"] == 800 * MIB


@pytest.mark.parametrize("reloaded", [False, True], ids=["none", "a reload removes them"])
def test_without_neighbours_the_answer_comes_with_the_next_reading_and_says_what_is_missing(reloaded: bool) -> None:
    site = Site(neighbours=BOTH if reloaded else ())
    request = site.make_room(500)
    site.stand.change_limits(neighbours=())
    site.sample()
    answer = site.answer(request)
    assert site.asked == [] and not answer.made and answer.missing_bytes == 400 * MIB
    assert f"500 MiB to reserve on {GPU}, and 100 MiB are free (0 B more are reserved)" in answer.why
    assert "wait longer (--wait)" in answer.why and "wait_s" not in answer.why
    assert steps(answer) == [NOTHING]


def test_the_room_outlives_the_connection_that_asked_until_its_time_is_up() -> None:
    site = Site(used=100)
    site.make_room(800, for_s=600.0)
    site.stand.leave(OPERATOR)
    site.sample()
    assert "are free" in refused(site.stand.ask(ENGINE, messages.ReserveDevice, GPU, 200 * MIB, 5.0), "DeviceFull")
    site.stand.pass_time(600.0)
    site.sample()
    assert isinstance(site.stand.ask(ENGINE, messages.ReserveDevice, GPU, 200 * MIB, 5.0), messages.Reserved)


def test_entries_in_use_stay_and_the_answer_says_how_many_bytes_they_have() -> None:
    site = Site(neighbours=())
    site.stand.open(ENGINE)
    site.stand.register(ENGINE, 1, 300 * MIB)
    request = site.make_room(350)
    (order,) = site.stand.orders(ENGINE)
    site.stand.carry_out(ENGINE, order, freed_bytes=0, keep=True)
    site.sample()
    answer = site.answer(request)
    assert not answer.made
    assert answer.steps[0].why == "of 300 MiB of tensors 300 MiB are in use"


def test_the_wait_ends_with_a_neighbour_that_never_answers() -> None:
    site = Site()
    request = site.make_room(500, wait_s=3.0)
    site.sample()
    site.stand.pass_time(4.0)
    answer = site.answer(request)
    assert not answer.made and steps(answer)[1] == ("vllm 127.0.0.1:8000", "asked", 0)
    again = site.make_room(500)
    site.sample()
    assert site.asked == [VLLM, OLLAMA], "a neighbour that is being asked is not asked again"
    site.answered("done")
    site.sample(100)
    assert "another room" in site.answer(again).steps[1].why
    site.stand.do(NeighbourAnswered(site.stand.neighbours_asked[0].number, "failed", "no answer within 20 s"))
    site.make_room(950)
    site.sample()
    assert site.asked == [VLLM, OLLAMA, VLLM], "it has answered since"


def test_each_room_that_is_refused_is_told_why() -> None:
    site = Site(reservations_max=2)

    def why(code: str, size: int, gauge: str = GPU) -> str:
        return refused(site.stand.ask(OPERATOR, messages.MakeRoom, gauge, size * MIB, 5.0, 5.0), code)

    assert "no gauge" in why("NoGauge", 1, "none")
    assert why("DeviceFull", 2 * TOTAL // MIB) == f"1.95 GiB are more than the 1000 MiB of {GPU}: ask for less"
    assert site.answer(site.make_room(50)).made
    site.make_room(500)
    assert "one room is made on a device at a time" in why("LimitReached", 10)
    site.stand.pass_time(60.0)
    site.sample(800)
    assert site.answer(site.make_room(50)).made
    assert "2 may be (a fixed limit)" in why("LimitReached", 1)
    site.sample(stale=True)
    assert "cannot be read" in why("NoGauge", 1)


def test_an_operator_ends_the_rooms_of_a_card_one_that_is_being_made_included_and_no_other_reservation() -> None:
    site = Site(used=600)
    assert site.answer(site.make_room(100)).made
    site.stand.sample(0.1, "other")
    site.stand.ask(OPERATOR, messages.MakeRoom, "other", 7 * MIB, 50.0, 5.0)
    assert isinstance(site.stand.reserve(ENGINE, 100, 50.0), messages.Reserved)
    request = site.make_room(500)
    site.sample()
    assert site.asked == [VLLM] and site.answer(request) is None
    assert site.stand.ask(3, messages.EndRoom, GPU).count == 2
    answer = site.answer(request)
    assert not answer.made and "ended before it was made" in answer.why
    site.answered("done")
    site.sample(0)
    assert site.asked == [VLLM] and all(row["waiting_reservations"] == 0 for row in site.stand.status()["devices"])
    assert [site.stand.device(card)["reserved_bytes"] // MIB for card in (GPU, "other")] == [100, 7]
    assert site.answer(site.make_room(900)).made
