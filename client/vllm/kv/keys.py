"""Names of KV blocks.

Owns: what a block's key covers beside the namespace, and the order of a request's blocks. Does not own: the namespace
(identity.engine), the digests of media (identity.content).

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
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgpack
from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx, make_offload_key

from ....errors import UnsupportedLeaf
from ....shm.index.keys import make_key
from ...arguments.namespace import Namespace
from ...identity.content import digest_of_item


class RequestMedia:
    """The media of a request. Their digests are computed in another thread. `offsets`: the position of each medium's
    first token in the prompt, in order."""

    __slots__ = ("_before", "_offsets", "settled")

    def __init__(self, offsets: Sequence[int] = ()) -> None:
        self._offsets = list(offsets)
        self._before: list[bytes | None] = [b""]
        self.settled = not self._offsets

    def name(self, items: Sequence[Any]) -> None:
        """Settles the digests of the media's processed items, in order; None for a missing one."""
        digests: list[bytes | None] = [None] * len(items)
        try:
            for at, item in enumerate(items):
                if item is not None:
                    with suppress(UnsupportedLeaf):
                        digests[at] = digest_of_item(item)
        finally:
            self.settle(digests)

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


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of an engine's requests, by KV cache group.

    Args:
        ranks: the number of workers. Each has a part of every chunk.
        tokens: tokens of one chunk, by the number of the group.
        chained: numbers of the groups whose chunks are stored with the chunk before as their parent.
        tokens_per_hash: tokens that one block hash stands for.
    """

    ranks: int
    tokens: Mapping[int, int]
    chained: Collection[int]
    tokens_per_hash: int


class Naming:
    """Makes the keys of one request's chunks. vLLM appends to its `hashes`. A chunk is given by vLLM's OffloadKey, the
    block hash and the number of the KV cache group, and by `end_token`, the position after its last token."""

    __slots__ = ("_base", "_chunks", "_generation", "_hashes", "_known", "_tag", "media")

    def __init__(self, namespace: Namespace, chunks: Chunks, media: RequestMedia, hashes: Sequence[Any]) -> None:
        self.media = media
        self._chunks = chunks
        self._hashes = hashes
        self._generation = namespace.generation
        self._tag = namespace.tag
        self._base = hashlib.sha256(self._tag + msgpack.packb([self._generation, "kv", chunks.ranks]))
        self._known: dict[bytes, tuple[bytes, ...]] = {}

    def keys(self, chunk: OffloadKey, end_token: int) -> tuple[bytes, ...] | None:
        """The keys of a chunk's parts, by rank; None if the chunk depends on something whose digest is not there."""
        known = self._known.get(chunk)
        if known is not None:
            return known
        media = self.media.before(end_token)
        if media is None:
            return None
        of_chunk = self._base.copy()
        of_chunk.update(msgpack.packb([chunk, media]))
        made = []
        for rank in range(self._chunks.ranks):
            of_rank = of_chunk.copy()
            of_rank.update(rank.to_bytes(4, "little"))
            made.append(make_key(self._tag, of_rank.digest(), self._generation))
        keys = self._known[chunk] = tuple(made)
        return keys

    def before(self, chunk: OffloadKey, end_token: int) -> tuple[bytes, ...] | None:
        """The keys of the chunk before; None for the first one, and in groups whose chunks are not chained."""
        group = get_offload_group_idx(chunk)
        at = end_token - self._chunks.tokens[group]
        return self._keys_at(group, at) if group in self._chunks.chained and at > 0 else None

    def keys_from(self, chunk: OffloadKey, end_token: int) -> list[bytes]:
        """The keys of a chunk and of those after it, each after its parent. Empty in groups whose chunks are not
        chained."""
        group = get_offload_group_idx(chunk)
        found: list[bytes] = []
        last = len(self._hashes) * self._chunks.tokens_per_hash if group in self._chunks.chained else 0
        for at in range(end_token, last + 1, self._chunks.tokens[group]):
            keys = self._keys_at(group, at)
            if keys is None:
                break
            found += keys
        return found

    def _keys_at(self, group: int, end_token: int) -> tuple[bytes, ...] | None:
        block_hash = self._hashes[end_token // self._chunks.tokens_per_hash - 1]
        return self.keys(make_offload_key(block_hash, group), end_token)
