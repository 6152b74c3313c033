"""What holds of a device with so many entries that its passes are cut in slices."""

from __future__ import annotations

from tensord.daemon.core.effects import Send
from tensord.daemon.devices.ranking import SORTED_WHOLE
from tensord.daemon.governor import effects, events
from tensord.daemon.governor.governor import Governor
from tensord.daemon.governor.limits import GovernorLimits
from tensord.ipc import messages
from tensord.ipc.modes import Tier

DEVICE = "card0"
TOTAL_BYTES = 1 << 40
ENTRIES = SORTED_WHOLE + 1000


def _governor() -> Governor:
    governor = Governor(GovernorLimits())
    governor.handle(events.GovernorClientJoined(1, "owner", 1), 0.0)
    governor.handle(events.GovernorReceived(1, messages.OpenDevice(1, DEVICE)), 0.0)
    for number in range(ENTRIES):
        key = number.to_bytes(8, "little") * 4
        governor.handle(events.GovernorReceived(1, messages.RegisterEntry(number + 2, DEVICE, key, 1 << 20, 64)), 0.0)
    return governor


def _sample(governor: Governor, share: float, now: float) -> list[effects.Effect]:
    """All that follows from a sample, slice by slice."""
    sample = events.Sample(DEVICE, Tier.DEVICE, int(share * TOTAL_BYTES), TOTAL_BYTES, "test", now)
    told = governor.handle(events.Sampled((sample,)), now)
    while (timer := governor.next_timer()) is not None and timer <= now:
        told += governor.handle(events.GovernorTick(), now)
    governor.check_invariants()
    return told


def _ordered(told: list[effects.Effect]) -> int:
    orders = [e.message for e in told if isinstance(e, Send) and isinstance(e.message, messages.Order)]
    return sum(len(order.keys) for order in orders)


def test_a_sample_that_needs_no_eviction_orders_nothing_however_many_entries_there_are() -> None:
    governor = _governor()
    for share, now in ((0.5, 1.0), (0.75, 2.0), (0.5, 3.0)):
        assert _ordered(_sample(governor, share, now)) == 0


def test_all_idle_entries_leave_in_one_pass_of_many_slices() -> None:
    governor = _governor()
    assert _ordered(_sample(governor, 0.94, 100.0)) == ENTRIES
