"""Embeddings of images, audio and video, by a hash of their raw bytes: looked up, stored, and counted.

Owns: the key of an image, what is stored for an embedding, and the statistics. Does not own: how long it is stored: the
daemon evicts by its policy and its quotas.
Invariants: a lookup sends no message. A payload of another format is a miss. A result pins its entry until it is
released.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, Self, get_args

import numpy as np

from ...errors import UsageError, shown
from ..arguments.namespace import Content, Namespace, check_namespace
from ..core.client import Client, check_client
from ..reading.lease import Lease
from ..writing.outcomes import Put
from .dp_mode import Recommendation, Resolution, recommend_dp_mode
from .measures import Counts, array_bytes

if TYPE_CHECKING:
    from ..reading.ring_mapping import Entry

Modality = Literal["image", "audio", "video"]

_KIND: Final = "visual"
_FIELD: Final = "embedding"


class VisualResult:
    """The result of a lookup. A hit pins the entry for as long as the result, or a view of the embedding, lives.

    Attributes:
        key: the embedding's key, 32 bytes.
        entry: what `Client.peek` tells of it, as how often it was used and how many clients hold it; None on a miss.
        bytes_saved: bytes of the embedding that need not be computed again; 0 on a miss.
        recommendation: whether to encode data parallel; None for audio.

    Example:
        >>> result = tensord.VisualCache(cache, ns).lookup("image", b"the bytes of a picture")
        >>> result.hit, result.bytes_saved
        (False, 0)
    """

    __slots__ = ("_lease", "bytes_saved", "entry", "key", "recommendation")

    def __init__(
        self, key: bytes, lease: Lease | None, entry: Entry | None, recommendation: Recommendation | None
    ) -> None:
        self.key, self.entry, self.recommendation = key, entry, recommendation
        self.bytes_saved = 0 if lease is None else array_bytes(lease.tree[_FIELD])
        self._lease = lease

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
        return self._held().tree[_FIELD]

    def torch(self, *, copy: bool = True) -> Any:
        """Returns the embedding with torch tensors for leaves; `copy` as for `Lease.torch`.

        Raises:
            ValueError: the lookup missed, or the result was released.
            UnsupportedLeaf: a leaf has a dtype that torch lacks.
        """
        return self._held().torch(copy=copy)[_FIELD]

    def release(self) -> None:
        """Drops the result's pin. Views that were taken before stay valid."""
        self._lease = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _held(self) -> Lease:
        if self._lease is None:
            raise ValueError("this result has no embedding: the lookup missed, or the result was released")
        return self._lease


class VisualCache:
    """Embeddings by the SHA-256 of the raw bytes that were encoded, in a namespace. Thread-safe.

    Args:
        cache: the client to use.
        namespace: what makes two encoders' outputs differ.
        encoder_depth: layers of the vision encoder, for the recommendation; None if unknown.

    Raises:
        UsageError: `cache` is no Client, or a value is out of its range; the message names it.

    Example:
        >>> visual = tensord.VisualCache(cache, ns)
        >>> visual.lookup("image", b"the bytes of a picture").hit
        False
        >>> visual.store("image", b"the bytes of a picture", np.zeros((576, 64), np.float32)).wait().state
        'stored'
        >>> with visual.lookup("image", b"the bytes of a picture") as result:
        ...     result.hit, result.embedding.shape
        (True, (576, 64))
    """

    def __init__(self, cache: Client, namespace: Namespace, *, encoder_depth: int | None = None) -> None:
        self._cache = check_client(cache, "cache")
        self._namespace = check_namespace(namespace)
        recommend_dp_mode(1, None, encoder_depth)
        self._encoder_depth = encoder_depth
        self._counts = Counts()

    def lookup(
        self, modality: Modality, raw: Content, *, batch_images: int = 1, resolution: Resolution | None = None
    ) -> VisualResult:
        """Looks up the embedding of these bytes. Sends no message; an absent daemon raises nothing.

        Args:
            raw: the raw bytes of the image, audio or video, before any processing.
            batch_images, resolution: of the batch that the item belongs to, for the recommendation.

        Raises:
            UsageError: the modality is unknown, `raw` has no bytes, or `recommend_dp_mode` refuses a value.
        """
        key = self.key(modality, raw)
        advice = recommend_dp_mode(batch_images, resolution, self._encoder_depth)
        lease = self._cache.get(key)
        if lease is not None and not (isinstance(lease.tree, dict) and _FIELD in lease.tree):
            lease = None
        entry = None if lease is None else self._cache.peek(key)
        result = VisualResult(key, lease, entry, advice if modality != "audio" else None)
        recommended = modality != "audio" and advice.use_dp
        counts = {"lookups": 1, "hits": result.hit, "saved_bytes": result.bytes_saved, "recommended": recommended}
        self._counts.add(counts)
        return result

    def key(self, modality: Modality, raw: Content) -> bytes:
        """The key of these bytes' embedding, for other calls of the client.

        Raises:
            UsageError: the modality is unknown, or `raw` has no bytes.
        """
        if modality not in get_args(Modality):
            raise UsageError(f"modality is {shown(modality)}; it must be one of {', '.join(get_args(Modality))}")
        if not isinstance(raw, bytes | bytearray | memoryview | np.ndarray):
            raise UsageError(f"raw is a {type(raw).__name__}; pass the raw bytes of the image, audio or video")
        if isinstance(raw, np.ndarray) and raw.dtype.hasobject:
            raise UsageError(f"raw is an array of dtype {raw.dtype}, which has no bytes of its own; pass the raw bytes")
        return self._namespace.key(_KIND, modality, raw.tobytes() if isinstance(raw, memoryview) else raw)

    def store(
        self, modality: Modality, raw: Content, embedding: Any, *, tokens: int = 0, ttl_s: float | None = None
    ) -> Put:
        """Stores an embedding. Returns once it is copied.

        Args:
            embedding: a tree as `Client.put` takes it, of any shape and dtype.
            tokens, ttl_s: as for `Client.put`.

        Raises:
            UsageError: as for `key` and `Client.put`.
            UnsupportedLeaf: the embedding is not a valid payload.
        """
        key = self.key(modality, raw)
        if not self._cache.contains(key):
            return self._cache.put(key, {_FIELD: embedding}, tokens=tokens, ttl_s=ttl_s)
        # It need not be copied.
        put = Put(key)
        put.settle("existed")
        return put

    def clear(self) -> int:
        """Removes all entries of the namespace, from all clients, and resets the statistics.

        Returns:
            How many entries there were.

        Raises:
            DaemonUnavailable, TimedOut: the daemon did not answer; the statistics are unchanged.
        """
        count = self._cache.clear(self._namespace)
        self._counts.reset()
        return count

    def statistics(self) -> dict[str, float]:
        """Counts since the last `clear`. `visual_vram_saved_bytes`: bytes of the embeddings of all hits.
        `dp_mode_recommendations`: lookups that recommended data parallel."""
        counts = self._counts.since_reset()
        hits, lookups = counts["hits"], counts["lookups"]
        return {
            "visual_cache_hits": hits,
            "visual_cache_misses": lookups - hits,
            "visual_cache_hit_rate": hits / lookups if lookups else 0.0,
            "visual_vram_saved_bytes": counts["saved_bytes"],
            "dp_mode_recommendations": counts["recommended"],
        }
