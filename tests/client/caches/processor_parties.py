"""A frontend and an engine as processes of their own. Without torch, which takes a process seconds to import."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

import tensord
from tensord.client.caches.processor.cache import Feature, ProcessorCache
from tensord.client.caches.processor.references import Reference
from tensord.errors import ReferenceLost

from ...daemon_process import PATIENCE_S
from ...processes import Stage

NAMESPACE: Final = tensord.Namespace(model="m", revision="r", dtype="float32", processor="parties")


def made_of(number: int) -> dict[str, Any]:
    """What a processor makes of picture `number`."""
    return {"pixel_values": np.full(1 << 14, number, np.float32), "number": number}


def a_frontend(stage: Stage, socket: Path) -> None:
    """Hears (hashes, numbers); tells what was there, and what it would send: references, or "whole"."""
    cache = ProcessorCache(tensord.Client(socket), NAMESPACE, put_wait_s=PATIENCE_S)
    while True:
        hashes, numbers = stage.hear()
        there = cache.is_cached(hashes)
        trees = [None if known else made_of(number) for known, number in zip(there, numbers, strict=True)]
        sent = cache.get_and_update(trees, hashes)
        stage.tell((there, [item if isinstance(item, Reference) else "whole" for item in sent]))


def an_engine(stage: Stage, socket: Path) -> None:
    """Hears of (hash, what was sent, number) each; tells which are right, or the hashes that are lost."""
    cache = ProcessorCache(tensord.Client(socket), NAMESPACE)
    while True:
        asked = stage.hear()
        try:
            trees = [f.data for f in cache.get_and_update_features(Feature(hash, data) for hash, data, _ in asked)]
        except ReferenceLost as lost:
            stage.tell(lost.hashes)
            continue
        right = [_is_made_of(tree, number) for tree, (_, _, number) in zip(trees, asked, strict=True)]
        # What it looks at nobody can evict.
        del trees
        stage.tell(right)


def _is_made_of(tree: Any, number: int) -> bool:
    return bool(tree["number"] == number and np.array_equal(tree["pixel_values"], made_of(number)["pixel_values"]))
