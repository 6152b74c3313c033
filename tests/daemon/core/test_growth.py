"""A ring that is still growing while it already serves."""

from __future__ import annotations

from .stand import Make


def test_a_place_that_fits_only_the_grown_ring_is_waited_for(make: Make) -> None:
    stand = make(4096, grown_bytes=512)
    request = stand.ask(1, 2000)
    stand.settle()
    assert stand.answered(1, request) is None
    assert stand.put(2, client=2) == "stored", "those behind it are not kept waiting"
    stand.grow(2048, more=True)
    stand.settle()
    assert stand.answered(1, request) is None
    stand.grow(4096, more=False)
    stand.settle()
    (place,) = stand.places[1]
    stand.write(place, b"x" * 2000)
    assert place.size >= 2000


def test_a_ring_that_stops_growing_early_refuses_what_waited(make: Make) -> None:
    stand = make(4096, grown_bytes=512)
    request = stand.ask(1, 2000)
    stand.settle()
    stand.grow(1024, more=False)
    stand.settle()
    answer = stand.answered(1, request)
    assert answer is not None and answer.error is not None and answer.error.code == "ObjectTooLarge"
    assert stand.put(2, 2000) == "ObjectTooLarge"
