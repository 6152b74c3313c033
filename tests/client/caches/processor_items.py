"""Pictures as a processor makes them, and senders and receivers of them in this process."""

from __future__ import annotations

import os
from itertools import count
from typing import Any, Final

import numpy as np
import torch

import tensord
from tensord.client.caches.processor.cache import Feature, ProcessorCache
from tensord.client.writing.outcomes import Put

from ...daemon_process import MIB, PATIENCE_S, Daemon

NAMESPACE: Final = tensord.Namespace(model="m", revision="r", dtype="float32", processor="p")

_numbers = count(1)


def fresh(letter: str = "") -> str:
    """A hash that no test has used."""
    return f"{letter}{next(_numbers):08}"


def picture(number: int, size_bytes: int = MIB) -> dict[str, Any]:
    """What a processor makes of a picture: told from another's by its number."""
    return {
        "pixel_values": torch.full((size_bytes // 4,), float(number)),
        "sizes": np.array([number, 2]),
        "meta": [number, "rgb", {"scale": 0.5}],
    }


def is_picture(found: Any, number: int) -> bool:
    """Whether it is the picture of that number, to the last value."""
    return bool(
        isinstance(found, dict)
        and torch.equal(found["pixel_values"], torch.full_like(found["pixel_values"], float(number)))
        and found["sizes"].tolist() == [number, 2]
        and found["meta"] == [number, "rgb", {"scale": 0.5}]
    )


def sender(client: tensord.Client, **options: Any) -> ProcessorCache:
    """A sender that waits for its puts for as long as a loaded machine takes."""
    return ProcessorCache(client, NAMESPACE, **{"put_wait_s": PATIENCE_S, **options})


def receiver(client: tensord.Client, **options: Any) -> ProcessorCache:
    return ProcessorCache(client, NAMESPACE, **options)


def read(cache: ProcessorCache, hash: str, data: Any) -> Any:
    """The tree that a receiver has of one feature."""
    (feature,) = cache.get_and_update_features([Feature(hash, data)])
    return feature.data


def press(client: tensord.Client, daemon: Daemon) -> None:
    """Fills the ring several times over with other entries, so that what is not held goes: with large ones, and then
    with small ones, since a large one takes the place of another rather than that of a small one and its neighbours.
    """
    puts: list[Put] = []
    for size_bytes in (MIB // 2, MIB // 16):
        filling = [(os.urandom(32), np.zeros(size_bytes, np.uint8)) for _ in range(2 * 16 * MIB // size_bytes)]
        puts += client.put_many(filling, wait=True, timeout_s=PATIENCE_S)
    assert {put.state for put in puts} <= {"stored", "refused"}
    assert daemon.running
