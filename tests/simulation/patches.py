"""What a simulated host changes in the library: its clocks, what happens during copies and waits, and its sizes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from tensord.client.writing import arena, outcomes, put, puts
from tensord.client.writing.wire import Wire
from tensord.daemon.memory import copier
from tensord.daemon.room import lending
from tensord.shm.payloads.packing import Packed, Whole

if TYPE_CHECKING:
    from .world import World

PIECE_BYTES: Final = 512
"""Bytes that a client copies at once."""
TURN_BYTES: Final = 1024
"""Bytes that the copier copies in one turn; 4 MiB in daemon/memory/copier.py."""
SMALL_BYTES: Final = 1024
"""Payloads up to this size are copied at once, and summed by their client; 128 KiB in daemon/memory/copier.py and
client/writing/put.py."""
SHARE: Final = 8
"""The part of the ring that one request may ask for, and that one client may have unused; 256 in client/writing/puts.py
and daemon/room/lending.py."""


def patches(world: World) -> list[Any]:
    """Patches that play actions while a client waits and between the pieces of its copies, and sizes for small
    rings."""
    chance, clock = world.chance, SimpleNamespace(monotonic=lambda: world.now)

    def wait_for_bell(wire: Wire, seen: int, timeout_s: float) -> None:
        for _ in range(chance.choice([1, 4, 16, 60])):
            world.meanwhile()
            if wire.bells != seen:
                return
        world.now += min(timeout_s, chance.choice([0.01, 0.1, 1.0]))

    def slowly(write: Callable[[Any, memoryview, int], None]) -> Callable[[Any, memoryview, int], None]:
        def written(payload: Any, memory: memoryview, start: int) -> None:
            whole = memoryview(bytearray(payload.payload_bytes))
            write(payload, whole, 0)
            for low in range(0, len(whole), PIECE_BYTES):
                piece = whole[low : low + PIECE_BYTES]
                memory[start + low : start + low + len(piece)] = piece
                for _ in range(chance.choice([0, 1, 1, 4])):
                    world.meanwhile()

        return written

    return [
        *(mock.patch.object(module, "time", clock) for module in (arena, outcomes, puts)),
        # Time passes while a client waits, and not while it looks.
        mock.patch.object(outcomes, "LOOK_S", 0.0),
        mock.patch.object(Wire, "wait_for_bell", wait_for_bell),
        mock.patch.object(Packed, "write", slowly(Packed.write)),
        mock.patch.object(Whole, "write", slowly(Whole.write)),
        # What other threads do is done in place.
        mock.patch.object(puts, "aside", lambda work: work()),
        mock.patch.object(copier, "TURN_BYTES", TURN_BYTES),
        mock.patch.object(copier, "SMALL_BYTES", SMALL_BYTES),
        mock.patch.object(put, "CHECKED_BYTES_MAX", SMALL_BYTES),
        mock.patch.object(puts, "SHARE", SHARE),
        mock.patch.object(lending, "CLIENT_SHARE", SHARE),
        mock.patch.object(lending, "ALL_SHARE", 2),
    ]
