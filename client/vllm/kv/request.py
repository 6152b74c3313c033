"""The state of one request on the scheduler's side.

Owns: its fields, and how a request names its agent. Does not own: their use (scheduler.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vllm.v1.kv_offload.base import OffloadKey

from ....errors import UsageError
from ....ipc.schema import AGENT_NAME_CHARS_MAX
from ...core.fields import check_name
from ...core.lease import Lease
from .keys import Naming

AGENT: Final = "tensord.agent"
_log = logging.getLogger("tensord")
_warned: set[str] = set()

Pinned = list[tuple[Lease, bytes]]
"""A chunk that is pinned: by rank, the lease of its part and the lease's handle."""


class RequestBlocks:
    """What the manager knows of a request. It is part of vLLM's ReqContext."""

    __slots__ = ("adapter", "agent", "began_s", "failed", "hashes", "naming", "pinned")

    def __init__(self, naming: Naming | None, hashes: Sequence[bytes], adapter: tuple[int, str] | None) -> None:
        self.naming = naming
        """None if the request shares nothing."""
        self.hashes = hashes
        self.adapter = adapter
        self.agent = ""
        """The agent that the request's blocks belong to; empty for none."""
        self.pinned: dict[OffloadKey, Pinned] = {}
        """Chunks found: by rank, the lease and its handle."""
        self.failed: set[OffloadKey] = set()
        self.began_s = time.monotonic()


def agent_of(params: Mapping[str, Any] | None) -> str:
    """The agent that a request's kv_transfer_params name; "" without one.

    An invalid name is logged once and ignored, because a client's request must not end the engine.
    """
    name = (params or {}).get(AGENT, "")
    try:
        check_name(f"{AGENT} in kv_transfer_params", name, AGENT_NAME_CHARS_MAX, least=0)
    except UsageError as error:
        if not _warned:
            _warned.add(AGENT)
            _log.warning("tensord: %s; the request's blocks belong to no agent. Not logged again", error)
        return ""
    return str(name)
