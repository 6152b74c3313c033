"""The keys of a trace's blocks."""

from __future__ import annotations

from hashlib import sha256
from typing import Final

from tensord.shm.ring.layout import KEY_BYTES

TAG: Final = b"replayed"
"""The namespace's."""


def key_of(block: int) -> bytes:
    """The key of a block: 32 bytes, the namespace's tag first."""
    return TAG + sha256(block.to_bytes(8, "little")).digest()[: KEY_BYTES - len(TAG)]
