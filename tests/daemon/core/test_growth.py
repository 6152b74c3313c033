"""A ring that is still growing while it already serves."""

from __future__ import annotations

from .stand import SPAN, Make, key


def test_a_put_that_fits_only_the_grown_ring_waits_for_it(make: Make) -> None:
    stand = make(4096, grown_bytes=512)
    stand.commit(1, 1, key(1), 2000)
    stand.part(1, 1, 2000, last=True)
    stand.settle()
    assert stand.put(2, client=2) == "stored", "those behind it are not kept waiting"
    stand.grow(2048, more=True)
    stand.settle()
    assert stand.outcome(1, 1) is None
    stand.grow(4096, more=False)
    stand.settle()
    assert stand.ended(1, 1) == "stored"


def test_a_growing_ring_evicts_before_it_makes_anybody_wait(make: Make) -> None:
    stand = make(4096, grown_bytes=SPAN)
    assert stand.put(1) == "stored"
    assert stand.put(2) == "stored"
    assert stand.stored() == {2}


def test_a_ring_that_stops_growing_early_refuses_what_waited(make: Make) -> None:
    stand = make(4096, grown_bytes=512)
    stand.commit(1, 1, key(1), 2000)
    stand.part(1, 1, 2000, last=True)
    stand.settle()
    stand.grow(1024, more=False)
    stand.settle()
    assert stand.ended(1, 1) == "StoreFull"
    assert stand.put(2, 2000) == "ObjectTooLarge"
