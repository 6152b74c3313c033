"""The hash for files: BLAKE3 if it is installed, as it is with vLLM, else SHA-256.

Owns: the choice. Does not own: which files are hashed. Invariants: a name contains its algorithm, so processes with
and without BLAKE3 share nothing instead of something wrong.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

ALGORITHM: Final = "blake3" if find_spec("blake3") else "sha256"
_PIECE_BYTES: Final = 16 << 20


def new_digest() -> Any:
    """A hash object with `update`, `digest` (32 bytes) and `hexdigest`, as in hashlib. BLAKE3 hashes large data in
    several threads."""
    if ALGORITHM == "sha256":
        return hashlib.sha256()
    from blake3 import blake3

    return blake3(max_threads=blake3.AUTO)


def file_digest(path: Path) -> str:
    """The digest of a file's bytes, as text: the algorithm, then hex.

    Raises:
        OSError: the file cannot be read.
    """
    digest = new_digest()
    piece = memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
    return f"{ALGORITHM}:{digest.hexdigest()}"
