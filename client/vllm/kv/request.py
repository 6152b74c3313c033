"""The state of one request on the scheduler's side.

Owns: its fields. Does not own: their use (scheduler.py), hints about the request's agent (hints.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from vllm.v1.kv_offload.base import OffloadKey

from ...core.lease import Lease
from .hints import NO_HINTS, AgentHints
from .keys import Naming

Pinned = list[tuple[Lease, bytes]]
"""A chunk that is pinned: by rank, the lease of its part and the lease's handle."""


class RequestBlocks:
    """What the manager knows of a request. It is part of vLLM's ReqContext."""

    __slots__ = ("adapter", "began_s", "failed", "hashes", "hints", "loads", "naming", "pinned")

    def __init__(self, naming: Naming | None, hashes: Sequence[bytes], adapter: tuple[int, str] | None) -> None:
        self.naming = naming
        """None if the request shares nothing."""
        self.hashes = hashes
        self.adapter = adapter
        self.hints: AgentHints = NO_HINTS
        self.loads = True
        """Whether the request may load blocks of this host's memory."""
        self.pinned: dict[OffloadKey, Pinned] = {}
        """Chunks found: by rank, the lease and its handle."""
        self.failed: set[OffloadKey] = set()
        self.began_s = time.monotonic()
