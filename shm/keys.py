"""How the 32 bytes of a key are divided: namespace tag 8, digest 20, generation 4.

Owns that division. Does not own what the digest is of (`client.namespace`, `prefix`).

The generation stands last: the index chooses a key's buckets and its fingerprint by bytes 8 to 24, which must differ
from key to key. So the digest covers the generation too. A key that a caller brings may be any 32 bytes: its generation
is compared with nothing unless the namespace that its first 8 bytes name is invalidated.
"""

from __future__ import annotations

import struct
from typing import Final

from .layout import KEY_BYTES, NAMESPACE_TAG_BYTES

GENERATION_MAX: Final = (1 << 32) - 1
_GENERATION: Final = struct.Struct("<I")
_GENERATION_AT: Final = KEY_BYTES - _GENERATION.size
DIGEST_BYTES: Final = _GENERATION_AT - NAMESPACE_TAG_BYTES


def make_key(tag: bytes, digest: bytes, generation: int) -> bytes:
    """The key of what `digest` names, in the namespace `tag` at `generation`. The digest's first 20 bytes count."""
    return tag + digest[:DIGEST_BYTES] + _GENERATION.pack(generation)


def generation_of(key: bytes) -> int:
    """The generation under which a key was made."""
    generation: int = _GENERATION.unpack_from(key, _GENERATION_AT)[0]
    return generation
