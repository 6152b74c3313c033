"""Who gets a place of the ring, when, and why not; and the room that is made for it, around pins and with moves."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.forms.events import Pressed
from tensord.daemon.room import lending
from tensord.daemon.room.stretches import MOVES_MAX
from tensord.ipc.messages import control as messages
from tensord.shm.ring.layout import SPAN_HEADER_BYTES, span_bytes

from .stand import Stand, key, with_clients

SIZE = span_bytes(1000)


def stand_of(ring_bytes: int = 64 << 10, **more: Any) -> Stand:
    """A store with the client 1."""
    stand = Stand(ring_bytes, **more)
    stand.join(1, uid=0)
    return stand


def full(ring_bytes: int = 64 << 10, **more: Any) -> Stand:
    """A store that is full of entries of 1000 bytes, put in the order of their numbers."""
    stand = stand_of(ring_bytes, **more)
    for number in range(ring_bytes // SIZE):
        assert stand.put(number, 1000) == "stored"
    return stand


def ahead(stand: Stand, client: int, *payload_bytes: int) -> int:
    """Asks for places that no put waits for."""
    request = stand.next_request()
    stand.send(client, messages.AskForGrants(request, [span_bytes(size) for size in payload_bytes], ahead=True))
    return request


def refusal(stand: Stand, client: int, request: int) -> messages.ErrorBody:
    answer = stand.answered(client, request)
    assert answer is not None and answer.error is not None and not answer.grants
    return answer.error


def lent_bytes(stand: Stand) -> int:
    return int(stand.store.status()["lent_bytes"])


def by_offset(stand: Stand) -> list[int]:
    """The numbers of what is stored, in the order in which it lies in the ring."""
    found = {number: stand.find(key(number)) for number in stand.stored()}
    return sorted(found, key=lambda number: found[number].offset)  # type: ignore[union-attr]


# ---- who


def test_the_first_place_waits_for_room_and_the_others_come_if_they_are_there() -> None:
    stand = full(1 << 20)
    request = stand.ask(1, 100_000, 1000)
    assert stand.answered(1, request) is None, "a place that large has to be made"
    stand.settle()
    place = stand.places[1][0]
    assert place.size == span_bytes(100_000)
    assert stand.store.is_lent(1, place.grant, place.offset, place.size)
    assert not stand.store.is_lent(1, place.grant, place.offset, place.size + 1)
    assert not stand.store.is_lent(2, place.grant, place.offset, place.size)


@pytest.mark.parametrize(
    ("size", "text"),
    [(70_000, "object_bytes_max is 65536"), (65_400, "ring_bytes is 65536"), (50_000, "max_bytes is 40000")],
)
def test_a_place_that_an_empty_store_has_no_room_for_is_refused(size: int, text: str) -> None:
    stand = stand_of(max_bytes=40_000)
    error = refusal(stand, 1, stand.ask(1, size))
    assert error.code == "ObjectTooLarge" and text in error.text


def test_a_limit_that_pinned_entries_fill_is_named_and_nothing_is_lent_beyond_it() -> None:
    stand = stand_of(max_bytes=20 * SIZE)
    number = 0
    while stand.put(number, 1000) == "stored":
        stand.pin(number)
        number += 1
    error = refusal(stand, 1, stand.requests)
    assert error.code == "StoreFull" and "max_bytes" in error.text
    assert number > 15 and stand.used_bytes <= 20 * SIZE


def test_under_pressure_every_request_is_refused_also_those_that_wait() -> None:
    stand = full()
    waits = stand.ask(1, 30_000)
    stand.do(Pressed(refuse=True, reason="12 bytes are free"))
    for request in (waits, stand.ask(1, 1000)):
        error = refusal(stand, 1, request)
        assert error.code == "UnderPressure" and "12 bytes" in error.text
    stand.press()
    assert stand.put(900, 1000) == "stored"


def test_a_client_has_a_share_ahead_of_need_and_another_for_puts_that_wait() -> None:
    stand = stand_of(1 << 20)
    stand.join(2, uid=0)
    # 1/64 of the ring: 13 places; 1/32: 26; 1/8: 104.
    for _ in range(40):
        request = ahead(stand, 1, *[1000] * 10)
        stand.settle()
        assert stand.answered(1, request) is not None, "a request ahead of need is answered at once"
    most = len(stand.bytes) // lending.ALL_SHARE
    assert most - 10 * SIZE < lent_bytes(stand) <= most
    for _ in range(200):
        stand.ask(1, 1000)
        stand.settle()
    assert lent_bytes(stand) <= len(stand.bytes) // lending.BUSY_SHARE + SIZE
    waiting = stand.store.status()["grants_waiting"]
    assert waiting
    # Another client still gets one place, and does not wait for the first one.
    stand.ask(2, *[1000] * 10)
    stand.settle()
    assert len(stand.places[2]) == 1
    # What the first one writes lets its own requests go on.
    for number, place in enumerate(stand.places[1][:]):
        stand.write(place, b"x" * 1000)
        stand.submit(1, stand.record(1, place, key(number)))
    stand.settle()
    assert stand.store.status()["grants_waiting"] < waiting


def test_uids_that_compete_have_equal_shares() -> None:
    stand = full(256 << 10)
    stand.join(2, uid=2)
    for number in range(1000, 1400):
        assert stand.put(number, 1000, client=2) == "stored"
        assert stand.put(number + 1000, 1000) == "stored"
    rows = stand.store.reports.by_uid()
    assert abs(rows[0]["span_bytes"] - rows[2]["span_bytes"]) < len(stand.bytes) // 10
    # A uid over its share gets nothing while its own entries are in use.
    for number in stand.stored():
        if number >= 2000 or number < 1000:
            stand.pin(number)
    there = rows[2]["entries"]
    for number in range(5000, 5100):
        if stand.put(number, 1000) != "stored":
            break
        stand.pin(number)
    [*_, last] = [answer for answer in stand.answers[1] if isinstance(answer, messages.GrantsLent)]
    assert last.error is not None and last.error.code == "StoreFull" and "of uid 0" in last.error.text
    assert stand.store.reports.by_uid()[2]["entries"] == there


def test_small_payloads_in_a_large_place_are_stored_though_the_store_has_all_its_entries() -> None:
    stand = stand_of(1 << 20, max_entries=40)
    for number in range(40):
        assert stand.put(number, 100) == "stored"
    stand.ask(1, 20_000)
    stand.settle()
    [place] = stand.places[1]
    for number in range(100, 130):
        stand.write(place, b"x" * 100)
        assert stand.finish(1, place, key(number)) == "stored"
    assert len(stand.stored()) <= 40 and stand.stored() >= set(range(110, 130))


# ---- the room that is made


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_room_for_later_puts_takes_nothing_that_was_just_put(policy: str) -> None:
    stand = full(policy=policy)
    # All but one entry that a put asks to evict are held.
    for number in range(1, len(stand.stored())):
        stand.pin(number)
    stored = 0
    for number in range(1000, 1010):
        stand.now += 1
        put = stand.put(number, 1000) == "stored"
        stored += put
        ahead(stand, 1, *[1000] * 4)
        stand.pass_time(10)
        assert not put or stand.find(key(number)) is not None, f"{number} was put and went"
    assert stored


def test_pinned_entries_stay_and_a_place_that_cannot_be_made_costs_no_entry() -> None:
    stand = full()
    # Every fourth entry is in use: no gap is wider than three entries.
    held = by_offset(stand)[::4]
    for number in held:
        stand.pin(number)
    assert stand.put(900, 3 * SIZE - SPAN_HEADER_BYTES) == "stored", "it lies between two pins"
    there = stand.stored()
    assert stand.put(901, 8000) == "StoreFull"
    assert stand.stored() == there >= set(held), "nothing was evicted in vain"
    stand.check()
    stand.views.clear()
    assert stand.put(902, 8000) == "stored"


def filled(ring_bytes: int, payload_bytes: int = 64, policy: str = "hazard", warm: int = 3) -> Stand:
    """A store that is full of entries of one size, of which every `warm`-th one was read twice."""
    span = span_bytes(payload_bytes)
    stand = stand_of(ring_bytes, policy=policy, max_entries=ring_bytes // (span // 2))
    number = 0
    while not stand.store.counters.evictions["capacity"]:
        stand.ask(1, *[payload_bytes] * 32)
        stand.settle()
        records = []
        for place in stand.places[1][:]:
            number += 1
            place.view.content = bytes(payload_bytes)
            records.append(stand.record(1, place, key(number)))
        stand.submit(1, *records)
        for _ in range(2):
            stand.now += 0.01
            stand.use(*(each for each in range(number - len(records) + 1, number + 1) if each % warm == 0))
    return stand


@pytest.mark.parametrize("policy", ["hazard", "lru"])
def test_a_place_is_made_out_of_thousands_of_small_entries(policy: str) -> None:
    stand = filled(8 << 20, policy=policy)
    there = len(stand.store.parts.table.by_key)
    assert stand.put(900_000, 2 << 20) == "stored"
    stand.check()
    assert len(stand.store.parts.table.by_key) > there // 2, "what is not in the way stays"


def test_a_large_place_costs_no_warm_entries_though_they_lie_between_the_cold_ones() -> None:
    stand = filled(4 << 20, payload_bytes=200, warm=2)
    warm = {number for number in stand.stored() if number % 2 == 0}
    assert stand.put(900_000, (4 << 20) * 3 // 10) == "stored"
    stand.check()
    assert stand.stored() >= warm and stand.store.counters.moves > 1000


@pytest.mark.parametrize(("pause_s", "goes_on"), [(0.0, False), (30.0, True)])
def test_large_puts_at_full_speed_soon_evict_stretches_instead_of_moving_entries(pause_s: float, goes_on: bool) -> None:
    """Moves have a share of the time; with pauses between the puts that is enough."""
    stand = filled(32 << 20, payload_bytes=8000, policy="lru")
    before = 0
    for number in range(40):
        stand.now += pause_s
        if number == 30:
            before = stand.store.counters.moves
        assert stand.put(900_000 + number, 400_000) == "stored"
        assert stand.stored() >= {*range(900_000 + max(0, number - 5), 900_000 + number + 1)}, "what was just put stays"
    stand.check()
    assert before > 0 and (stand.store.counters.moves > before) == goes_on


@pytest.mark.parametrize("meanwhile", ["pinned", "ended", "left", "restarted"])
def test_moves_of_several_rounds_stand_what_comes_between_them(meanwhile: str) -> None:
    stand = filled(2 << 20, payload_bytes=200, warm=2)
    stand.join(2, uid=0)
    warm = [number for number in sorted(stand.stored()) if number % 2 == 0]
    request = stand.ask(2, (2 << 20) * 3 // 10)
    while not stand.moves:
        stand.go_on()
        if stand.scans:
            stand.scan()
    assert len(stand.moves) == MOVES_MAX
    for _ in range(MOVES_MAX // 2):
        stand.move()
    match meanwhile:
        case "pinned":
            for number in warm[:: len(warm) // 8]:
                stand.pin(number)
        case "ended":
            stand.send(1, messages.Clear(stand.next_request()))
        case "left":
            stand.leave(2)
        case "restarted":
            stand.forget_work()
            stand.restart(1, 2)
    stand.settle()
    stand.check()
    if meanwhile == "pinned":
        answer = stand.answered(2, request)
        assert answer is not None and (answer.grants or answer.error)


def scattered(*clients: int) -> Stand:
    """A store that is full of small entries, between which other clients have places that they do not use."""
    stand = stand_of(1 << 20, max_entries=6000)
    stand.join(*clients, uid=0)
    number = 0
    for _ in range(20):
        for client in clients:
            ahead(stand, client, 1000)
            stand.settle()
        for _ in range(40):
            number += 1
            assert stand.put(number, 1000) == "stored"
    return stand


def test_a_place_that_fits_beside_entries_waits_for_places_that_nobody_uses() -> None:
    stand = scattered(2, 3)
    request = stand.ask(1, 700_000)
    stand.settle()
    assert stand.answered(1, request) is None, "the clients that have unused places are asked for them"
    for client in (2, 3):
        assert any(isinstance(answer, messages.PlacesWanted) for answer in stand.answers[client])
    for client in (2, 3):
        grants = [place.grant for place in stand.places[client]]
        stand.give_up(client, stand.places[client][:])
        stand.send(client, messages.ReturnGrants(grants))
    stand.settle()
    answer = stand.answered(1, request)
    assert answer is not None and answer.error is None


def test_a_place_waits_for_places_of_a_stopped_client_for_a_moment_only() -> None:
    stand = scattered(2, 3)
    request = stand.ask(1, 700_000)
    stand.settle()
    assert stand.answered(1, request) is None
    stand.pass_time(lending.UNUSED_S)
    assert refusal(stand, 1, request).code == "StoreFull"
    assert sum(isinstance(answer, messages.PlacesWanted) for answer in stand.answers[2]) == 1


def test_a_place_is_made_though_nothing_around_the_largest_hole_may_go() -> None:
    stand = full()
    rows = by_offset(stand)
    assert stand.put(900, 2 * SIZE) == "stored"
    hole = by_offset(stand).index(900)
    stand.evict(900)
    for number in by_offset(stand)[max(hole - 2, 0) : hole + 2]:
        stand.pin(number)
    assert stand.put(901, 4 * SIZE) == "stored"
    assert len(stand.stored()) > len(rows) // 2


def test_places_that_are_kept_for_puts_count_as_free_bytes_in_one_piece() -> None:
    stand = with_clients(1 << 20)
    for number in range(300):
        assert stand.put(number, 3000) == "stored"
    stand.send(1, messages.Clear(stand.next_request(), None))
    stand.settle()
    assert stand.store.parts.runway.places.ready_bytes
    assert stand.store.status()["largest_free_bytes"] == 1 << 20
