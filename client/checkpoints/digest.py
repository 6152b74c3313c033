"""The hash for files: BLAKE3 if it is installed, as it is with vLLM, else SHA-256.

Owns: the choice. Does not own: the bytes that are hashed. Invariants: a name contains its algorithm, so processes with
and without BLAKE3 share nothing instead of something wrong.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from typing import Any, Final

ALGORITHM: Final = "blake3" if find_spec("blake3") else "sha256"


def new_digest() -> Any:
    """A hash object with `update`, `digest` (32 bytes) and `hexdigest`, as in hashlib."""
    if ALGORITHM == "sha256":
        return hashlib.sha256()
    from blake3 import blake3

    return blake3()
