"""The hash that names files: BLAKE3 where it is installed, as it is with vLLM, else SHA-256.

A name says which of them made it, so that processes with and without BLAKE3 share nothing rather than something wrong.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from typing import Any, Final

ALGORITHM: Final = "blake3" if find_spec("blake3") else "sha256"


def new_digest() -> Any:
    """With `update`, `digest` (32 bytes) and `hexdigest`, as hashlib's."""
    if ALGORITHM == "sha256":
        return hashlib.sha256()
    from blake3 import blake3

    return blake3()
