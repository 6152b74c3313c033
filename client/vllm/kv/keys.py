"""Names of KV blocks.

Owns: what a block's key covers beside the namespace. Does not own: the namespace (identity.engine), the digests of
media (identity.content).

A key covers vLLM's block hash, which stands for all tokens up to the block's end, the request's cache salt, and names
of its media. vLLM takes these names from clients, so a key covers the content as well: the digest of each medium that
begins before the block's end. Blocks of requests with a LoRA adapter have no key.

Invariants
- Blocks whose KV may differ have different keys.
- A block that depends on something without a digest has no key.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import msgpack

from ....shm.index.keys import make_key
from ...arguments.namespace import Namespace


class RequestMedia:
    """The media of a request. Their digests are computed in another thread.

    Args:
        offsets: the position of each medium's first token in the prompt, in order.
    """

    __slots__ = ("_before", "_offsets", "settled")

    def __init__(self, offsets: Sequence[int] = ()) -> None:
        self._offsets = list(offsets)
        self._before: list[bytes | None] = [b""]
        self.settled = not self._offsets

    def settle(self, digests: Sequence[bytes | None]) -> None:
        """Sets the digests of the media, in order; None for a medium without one."""
        before: list[bytes | None] = [b""]
        for offset, digest in zip(self._offsets, digests, strict=True):
            last = before[-1]
            if last is None or digest is None:
                before.append(None)
            else:
                before.append(hashlib.sha256(last + offset.to_bytes(8, "little") + digest).digest())
        self._before = before
        # Last: another thread that sees it finds the digests.
        self.settled = True

    def reach(self, end_token: int) -> int:
        """How many media begin before `end_token`."""
        return bisect_left(self._offsets, end_token)

    def before(self, end_token: int) -> bytes | None:
        """A digest of the media that begin before `end_token`; None if one of them has none, or not yet."""
        reach = self.reach(end_token)
        return self._before[reach] if reach < len(self._before) else None


class Naming:
    """Makes the keys of one request's blocks.

    Args:
        namespace: at its current generation.
        ranks: the number of workers. Each has a part of every block.
    """

    __slots__ = ("_base", "_generation", "_known", "_ranks", "_tag", "media")

    def __init__(self, namespace: Namespace, ranks: int, media: RequestMedia) -> None:
        self.media = media
        self._generation = namespace.generation
        self._tag = namespace.tag
        self._base = hashlib.sha256(self._tag + msgpack.packb([self._generation, "kv", ranks]))
        self._ranks = [rank.to_bytes(4, "little") for rank in range(ranks)]
        self._known: dict[bytes, tuple[bytes, ...]] = {}

    def keys(self, block: bytes, end_token: int) -> tuple[bytes, ...] | None:
        """The keys of a block's parts, by rank; None if the block depends on something whose digest is not there.

        Args:
            block: vLLM's OffloadKey: the block hash and the number of the KV cache group.
            end_token: the position after the block's last token.
        """
        known = self._known.get(block)
        if known is not None:
            return known
        media = self.media.before(end_token)
        if media is None:
            return None
        of_block = self._base.copy()
        of_block.update(msgpack.packb([block, media]))
        made = []
        for rank in self._ranks:
            of_rank = of_block.copy()
            of_rank.update(rank)
            made.append(make_key(self._tag, of_rank.digest(), self._generation))
        keys = self._known[block] = tuple(made)
        return keys


def media_of(request: Any) -> tuple[list[int], list[Any]]:
    """The offsets of a request's media in its prompt, in order, and their processed items; None for a missing one."""
    features = sorted(request.mm_features or (), key=lambda feature: feature.mm_position.offset)
    return [feature.mm_position.offset for feature in features], [feature.data for feature in features]
