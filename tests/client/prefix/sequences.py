"""Sequences of tokens and what a model's layers would keep of them, and the calls that tests of prefixes make."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

import tensord
from tensord import Media, NormalLayer, PrefixCache, PrefixMatch
from tensord.client.prefix.layers import PrefixLayer
from tensord.ipc.messages import control as messages

from ...daemon_process import PATIENCE_S, some

numbers = count()

BLOCK = 16

TEXT = np.arange(1, 101, dtype=np.uint32)
"""A hundred tokens: six blocks and a quarter."""


def namespace_of(number: int) -> tensord.Namespace:
    return tensord.Namespace(model=f"prefix-{number}", revision="1", dtype="float32", processor="none")


def kv(tokens: Sequence[int] | np.ndarray[Any, Any], wide: int = 4) -> dict[str, Any]:
    """What a layer would have of tokens: each position's depends on all tokens up to it. [1, 2, tokens, wide]"""
    sums = np.cumsum(np.asarray(tokens, np.float64))
    k = np.broadcast_to(sums[None, None, :, None], (1, 2, len(sums), wide))
    return {"k": k, "v": (-k).astype(np.float32)}


def normal(tokens: Sequence[int] | np.ndarray[Any, Any], layers: int = 2) -> list[PrefixLayer]:
    return [NormalLayer(kv(tokens)) for _ in range(layers)]


def stored(
    cache: PrefixCache, tokens: np.ndarray[Any, Any], layers: list[PrefixLayer] | None = None, **more: Any
) -> Any:
    put = cache.put(tokens, normal(tokens) if layers is None else layers, **more).wait(PATIENCE_S)
    assert put.state in ("stored", "existed"), put
    return put


def matched(cache: PrefixCache, tokens: Any, **more: Any) -> PrefixMatch:
    return some(cache.match(tokens, **more))


def offset_of(cache: PrefixCache, tokens: Any, **more: Any) -> int:
    match = cache.match(tokens, **more)
    return 0 if match is None else match.offset


def assert_right(match: PrefixMatch, tokens: np.ndarray[Any, Any], layer: int = 0) -> None:
    """That the match's arrays are those of its tokens."""
    wanted = kv(tokens[: match.offset])
    found = match.joined(layer)
    np.testing.assert_array_equal(found["k"], wanted["k"])
    np.testing.assert_array_equal(found["v"], wanted["v"])


def picture(start: int, length: int, content: bytes, modality: Any = "image") -> Media:
    return Media(start, length, modality, hashlib.sha256(content).digest())


def changed(tokens: np.ndarray[Any, Any], at: int) -> np.ndarray[Any, Any]:
    other = tokens.copy()
    other[at:] += 1000
    return other


def answer_of(cache: PrefixCache, tokens: np.ndarray[Any, Any], media: Sequence[Media] = ()) -> messages.Matched:
    return some(cache._ask(tokens, tuple(media), "", time.monotonic() + PATIENCE_S))
