"""The pages of an inbox go back to the system once the daemon has read them, and not before."""

from __future__ import annotations

from tensord.client.writing.memory import Inbox
from tensord.client.writing.wire import Granted
from tensord.shm.ring.layout import PAGE_BYTES


def test_a_payload_stays_until_its_record_was_carried_out_whenever_its_put_ends() -> None:
    written = settled = 5
    places: list[object] = []

    def progress() -> tuple[int, int]:
        """Another thread ends its put, record 6, right after the numbers are read."""
        nonlocal written
        found = written, settled
        if places:
            written = 6
            places.clear()
        return found

    inbox = Inbox(16 * PAGE_BYTES, progress)
    places.append(inbox.hold(Granted(1, 0, 4 * PAGE_BYTES)))
    inbox.bytes[: 4 * PAGE_BYTES] = b"x" * (4 * PAGE_BYTES)
    for _ in range(3):
        inbox.tidy()
        assert bytes(inbox.bytes[: 4 * PAGE_BYTES]) == b"x" * (4 * PAGE_BYTES)
    assert not places
    settled = 6
    inbox.tidy()
    assert not any(inbox.bytes[: 4 * PAGE_BYTES])
    inbox.close()
