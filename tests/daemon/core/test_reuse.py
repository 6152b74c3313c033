"""What the store tells readers of an entry's reuse, by way of the index."""

from __future__ import annotations

from tensord.daemon.core.events import Accessed, HoldersCounted
from tensord.ipc import messages

from .stand import SPAN, Stand, key


def told(stand: Stand, number: int) -> tuple[int, int]:
    """(uses, holders) as a reader sees them."""
    slot = next(slot for slot in stand.index.slots() if slot.key == key(number) and slot.published)
    word = stand.index._reuse[slot.number]
    return int(word) & (1 << 48) - 1, int(word) >> 48


def test_the_index_shows_every_use_and_every_change_of_holders() -> None:
    stand = Stand()
    stand.join(1)
    for number in (1, 2):
        stand.put(number)
    first, second = (stand.pin(number).span_id for number in (1, 2))
    assert told(stand, 1) == told(stand, 2) == (0, 0)
    stand.do(Accessed([first, 77, first, second]))
    assert (told(stand, 1), told(stand, 2)) == ((2, 0), (1, 0))
    stand.do(HoldersCounted([(first, 3), (77, 9)]))
    assert (told(stand, 1), told(stand, 2)) == ((2, 3), (1, 0))
    stand.send(1, messages.Touch(1, [key(1)]))
    assert stand.put(1) == "existed"
    stand.do(HoldersCounted([(first, 0), (second, 1)]))
    assert (told(stand, 1), told(stand, 2)) == ((4, 0), (1, 1))


def test_shown_uses_stay_with_a_republished_victim_and_end_with_its_span() -> None:
    stand = Stand(SPAN)
    stand.join(1)
    stand.put(1)
    view = stand.pin(1)
    stand.do(Accessed([view.span_id] * 5))
    stand.do(HoldersCounted([(view.span_id, 1)]))
    stand.put(2)
    assert told(stand, 1) == (5, 1), "a pinned entry was unpublished for room, and published again"
    stand.views.clear()
    stand.settle()
    stand.send(1, messages.Evict(2, [key(1)]))
    stand.settle()
    stand.put(1)
    assert told(stand, 1) == (0, 0)
    stand.do(HoldersCounted([(view.span_id, 1)]))
    assert told(stand, 1) == (0, 0), "a count of what was there before came late"
