"""What tests of the device cache share: a card that is a folder, tensors on it, a daemon that watches it."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import tensord
from tensord.errors import DeviceFull
from tensord.testing.fake_vram import FakeCard, FakeTensor, FakeVram

from ...daemon_process import SHM_FOLDER, Daemon, until

Found = TypeVar("Found")

CARD = "card0"
TOTAL_BYTES = 1 << 20
ELEMENTS = 8192
ENTRY_BYTES = 4 * ELEMENTS


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def values(number: int) -> Any:
    """What entry `number` holds: (ELEMENTS,) float32, of which no two agree."""
    return np.arange(ELEMENTS, dtype=np.float32) + 1000.0 * number


@contextmanager
def card_folder() -> Iterator[Path]:
    # In memory: tests write to it all the time.
    with tempfile.TemporaryDirectory(prefix="tensord-card-", dir=SHM_FOLDER) as folder:
        yield Path(folder)


def watching(card: FakeCard, **flags: object) -> Daemon:
    """A daemon that reads the card's gauge often, and counts entries as idle at once where it goes by that."""
    return Daemon(
        **{
            "gauges_device": "file",
            "gauges_host": "none",
            "gauges_file": card.gauge_file,
            "gauges_sample_s": "30ms",
            "gauges_sample_pressed_s": "30ms",
            "pressure_critical_idle_s": "50ms",
            "pressure_retry_s": "200ms",
            **flags,
        }
    )


def filled(card: FakeCard, share: float) -> None:
    """Occupies so much that the card shows `share`, whatever is held on it besides; it must be more than that."""
    used_bytes, total_bytes = card.reading()
    others_bytes = used_bytes - card._occupied_bytes
    card.occupy(max(0, int(share * total_bytes) - others_bytes))


def filled_until(card: FakeCard, share: float, condition: Callable[[], Found], what: str) -> Found:
    """Keeps the card at `share` until `condition()` is true, and gives its value.

    In critical, entries leave in the order in which they become idle, and the first that leave end the mode: what they
    free has to be taken again for the others to leave.
    """

    def found() -> Found:
        with suppress(DeviceFull):  # an owner was quicker
            filled(card, share)
        return condition()

    return until(found, what)


def host_values(tree: Any) -> Any:
    """The values of a tree's tensor "a", on whichever tier it lies."""
    leaf = tree["a"]
    return leaf.numpy() if isinstance(leaf, FakeTensor) else leaf


def held(cache: tensord.DeviceCache, wanted: bytes, **options: Any) -> tensord.DeviceLease:
    """A lease on an entry that must be there."""
    lease = cache.get(wanted, **options)
    assert lease is not None, f"{wanted.hex()} is on no tier"
    return lease


def put_some(cache: tensord.DeviceCache, vram: FakeVram, numbers: range, **options: Any) -> list[tensord.Registration]:
    """Puts entries of which each holds what `values` says."""
    return [cache.put(key(n), {"a": vram.upload(values(n)), "n": n}, wait=True, **options) for n in numbers]
