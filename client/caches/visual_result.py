"""A stored embedding: its payload, and the result of a lookup.

Owns: the fields stored beside an embedding, their checks, and how a caller reads a hit. Does not own: lookups, keys and
statistics (visual.py).
Invariants: a payload of another format is a miss. A result pins its entry until it is released.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from ...errors import UsageError
from ..arguments.checks import check_name
from ..reading.lease import Lease
from .dp_mode import Recommendation, Resolution, check_resolution
from .measures import array_bytes

if TYPE_CHECKING:
    from ..reading.entry import Reuse

_ENCODER_CHARS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class StoredEmbedding:
    """An entry that `embedding_payload` made."""

    lease: Lease
    embedding: Any
    resolution: tuple[int, int] | None
    encoder: str


def embedding_payload(embedding: Any, resolution: Resolution | None, encoder: str) -> dict[str, Any]:
    """The payload that is stored for an embedding.

    Raises:
        UsageError: `encoder` is too long or no text, or `resolution` is invalid.
    """
    check_name("encoder", encoder, _ENCODER_CHARS_MAX, 0)
    sides = None if resolution is None else list(check_resolution(resolution))
    return {"embedding": embedding, "resolution": sides, "encoder": encoder}


def stored_embedding(lease: Lease | None) -> StoredEmbedding | None:
    """The stored embedding of a lease; None without a lease, or if the payload has another format."""
    if lease is None:
        return None
    body = lease.tree
    if not isinstance(body, dict) or "embedding" not in body:
        return None
    try:
        resolution = None if body.get("resolution") is None else check_resolution(body["resolution"])
        check_name("encoder", body.get("encoder"), _ENCODER_CHARS_MAX, 0)
    except UsageError:
        return None
    return StoredEmbedding(lease, body["embedding"], resolution, body["encoder"])


class VisualResult:
    """The result of a lookup. A hit pins the entry for as long as the result, or a view of the embedding, lives.

    Attributes:
        key: the embedding's key, 32 bytes.
        reuse: how many clients hold the entry and how often it was used, updated about once a second; None on a miss.
        created_at: when it was stored, in Unix seconds; None on a miss, or if it was evicted during the lookup.
        resolution: the stored (width, height) in pixels; None on a miss, or if none was stored.
        encoder: the stored name of the encoder; empty on a miss.
        bytes_saved: bytes of the embedding that need not be computed again; 0 on a miss.
        recommendation: whether to encode data parallel; None for audio.

    Example:
        >>> result = tensord.VisualCache(cache, ns).lookup("image", b"the bytes of a picture")
        >>> result.hit, result.bytes_saved
        (False, 0)
    """

    __slots__ = (
        "_embedding",
        "_lease",
        "bytes_saved",
        "created_at",
        "encoder",
        "key",
        "recommendation",
        "resolution",
        "reuse",
    )

    def __init__(
        self,
        key: bytes,
        found: StoredEmbedding | None,
        reuse: Reuse | None,
        created_at: float | None,
        recommendation: Recommendation | None,
    ) -> None:
        self.key = key
        self.reuse = reuse
        self.created_at = created_at
        self.recommendation = recommendation
        self.resolution = found.resolution if found is not None else None
        self.encoder = found.encoder if found is not None else ""
        self.bytes_saved = array_bytes(found.embedding) if found is not None else 0
        self._lease = found.lease if found is not None else None
        self._embedding = found.embedding if found is not None else None

    @property
    def hit(self) -> bool:
        """Whether there is an embedding. False once the result was released."""
        return self._lease is not None

    @property
    def embedding(self) -> Any:
        """The embedding as it was stored. Its arrays are read-only numpy views.

        Raises:
            ValueError: the lookup missed, or the result was released.
        """
        self._held()
        return self._embedding

    def torch(self, *, copy: bool = True) -> Any:
        """Returns the embedding with torch tensors for leaves; `copy` as for `Lease.torch`.

        Raises:
            ValueError: the lookup missed, or the result was released.
            UnsupportedLeaf: a leaf has a dtype that torch lacks.
        """
        return self._held().torch(copy=copy)["embedding"]

    @property
    def access_count(self) -> int:
        """How often all processes used the entry, updated about once a second; 0 on a miss."""
        return 0 if self.reuse is None else self.reuse.uses

    def release(self) -> None:
        """Drops the result's pin. Views that were taken before stay valid."""
        self._lease = self._embedding = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _held(self) -> Lease:
        if self._lease is None:
            raise ValueError("this result has no embedding: the lookup missed, or the result was released")
        return self._lease
