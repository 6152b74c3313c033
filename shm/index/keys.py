"""The division of a key's 32 bytes: namespace tag (8 bytes), digest (20), generation (4).

The generation comes last: the index chooses a key's buckets and fingerprint by bytes 8 to 24, which must differ from
key to key. For the same reason the digest covers the generation too. A key that a caller brings may be any 32 bytes.
Its generation matters only if the namespace named by its first 8 bytes is invalidated.
"""

from __future__ import annotations

import struct
from typing import Final

from ..ring.layout import KEY_BYTES, NAMESPACE_TAG_BYTES

GENERATION_MAX: Final = (1 << 32) - 1
_GENERATION: Final = struct.Struct("<I")
_GENERATION_AT: Final = KEY_BYTES - _GENERATION.size
SHOWN_DIGITS: Final = 28
DIGEST_BYTES: Final = _GENERATION_AT - NAMESPACE_TAG_BYTES


def make_key(tag: bytes, digest: bytes, generation: int) -> bytes:
    """A key of the namespace `tag` (8 bytes) at `generation`, from the first 20 bytes of `digest`."""
    return tag + digest[:DIGEST_BYTES] + _GENERATION.pack(generation)


def shortened(key: bytes) -> str:
    """A key in a message: so many digits that keys of one namespace differ."""
    return f"{key.hex()[:SHOWN_DIGITS]}…"


def generation_of(key: bytes) -> int:
    """The namespace's generation at which the key was made."""
    generation: int = _GENERATION.unpack_from(key, _GENERATION_AT)[0]
    return generation
