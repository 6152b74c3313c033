"""The state of one request on the scheduler's side.

Owns: its fields, and the order of its chunks. Does not own: the use of either (scheduler.py), hints about the request's
agent (hints.py).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx, make_offload_key

from ...computing.remote_run import RemoteRun
from ...reading.lease import Lease
from .hints import NO_HINTS, AgentHints
from .keys import Naming

Pinned = list[tuple[Lease, bytes]]
"""A chunk that is pinned: by rank, the lease of its part and the lease's handle."""


@dataclass(slots=True, eq=False)
class RequestBlocks:
    """What the manager knows of a request. It is part of vLLM's ReqContext.

    `naming`: None if the request shares nothing. `loads`: whether the request may load blocks of this host's memory.
    `pinned`, `failed`: chunks that were found, and those whose load failed. `run`: what the daemon fetches for the
    request, or has fetched.
    """

    naming: Naming | None = None
    hashes: Sequence[bytes] = ()
    hints: AgentHints = NO_HINTS
    loads: bool = True
    pinned: dict[OffloadKey, Pinned] = field(default_factory=dict)
    failed: set[OffloadKey] = field(default_factory=set)
    run: RemoteRun | None = None
    began_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of requests, by KV cache group. `end_token`: the position after a chunk's last token.

    Args:
        tokens: tokens of one chunk, by the number of the group.
        chained: numbers of the groups whose chunks are stored with the chunk before as their parent.
        tokens_per_hash: tokens that one block hash stands for.
    """

    tokens: Mapping[int, int]
    chained: Collection[int]
    tokens_per_hash: int

    def before(self, state: RequestBlocks, key: OffloadKey, end_token: int) -> tuple[bytes, ...] | None:
        """The keys of the chunk before; None for the first one, and in groups whose chunks are not chained."""
        group = get_offload_group_idx(key)
        at = end_token - self.tokens[group]
        if group not in self.chained or at <= 0 or state.naming is None:
            return None
        return state.naming.keys(self._block(state, group, at), at)

    def keys_from(self, state: RequestBlocks, key: OffloadKey, end_token: int) -> list[bytes]:
        """The keys of a chunk and of those after it, each after its parent. Empty in groups whose chunks are not
        chained."""
        group = get_offload_group_idx(key)
        keys: list[bytes] = []
        if group not in self.chained or state.naming is None:
            return keys
        for end in range(end_token, len(state.hashes) * self.tokens_per_hash + 1, self.tokens[group]):
            names = state.naming.keys(self._block(state, group, end), end)
            if names is None:
                break
            keys += names
        return keys

    def _block(self, state: RequestBlocks, group: int, end_token: int) -> OffloadKey:
        return make_offload_key(state.hashes[end_token // self.tokens_per_hash - 1], group)
