"""Embeddings of images, audio and video, by a hash of their raw bytes: looked up, stored, and counted.

Owns: the key of an image, and the statistics. Does not own: what is stored for an embedding (visual_result.py), nor how
long: the daemon evicts by its policy and its quotas.
Invariants: a lookup sends no message.
"""

from __future__ import annotations

import threading
from typing import Any, Final, Literal, get_args

import numpy as np

from ...errors import UsageError, shown
from ..arguments.namespace import Content, Namespace, check_namespace
from ..core.client import Client, check_client
from ..threads import forks
from ..writing.outcomes import Put
from .dp_mode import Resolution, recommend_dp_mode
from .visual_result import VisualResult, embedding_payload, stored_embedding

Modality = Literal["image", "audio", "video"]

_KIND: Final = "visual"
_OWN_MAX: Final = 1 << 16


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
        self._lock = threading.Lock()
        self._own: dict[bytes, Put] = {}
        self._reset_statistics()
        forks.follow(self, forks.Place.VISUAL_CACHES)

    def lookup(
        self, modality: Modality, raw: Content, *, batch_images: int = 1, resolution: Resolution | None = None
    ) -> VisualResult:
        """Looks up the embedding of these bytes. Sends no message; an absent daemon raises nothing.

        Args:
            raw: the raw bytes of the image, audio or video, before any processing.
            batch_images, resolution: of the batch that the item belongs to, for the recommendation. On a hit the stored
                resolution replaces a missing one.

        Raises:
            UsageError: the modality is unknown, `raw` has no bytes, or `recommend_dp_mode` refuses a value.
        """
        key = self.key(modality, raw)
        recommendation = recommend_dp_mode(batch_images, resolution, self._encoder_depth)
        found = stored_embedding(self._cache.get(key))
        entry = reuse = None
        if found is not None:
            entry, reuse = self._cache.peek(key), self._cache.reuse(key)
            if resolution is None:
                recommendation = recommend_dp_mode(batch_images, found.resolution, self._encoder_depth)
        result = VisualResult(
            key,
            found,
            reuse,
            entry.created_unix_s if entry is not None else None,
            recommendation if modality != "audio" else None,
        )
        with self._lock:
            self._hits += result.hit
            self._misses += not result.hit
            self._saved_bytes += result.bytes_saved
            self._recommendations += result.recommendation is not None and result.recommendation.use_dp
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
        self,
        modality: Modality,
        raw: Content,
        embedding: Any,
        *,
        resolution: Resolution | None = None,
        encoder: str = "",
        tokens: int = 0,
        ttl_s: float | None = None,
    ) -> Put:
        """Stores an embedding. Returns once it is copied.

        Args:
            embedding: a tree as `Client.put` takes it, of any shape and dtype.
            resolution: (width, height) in pixels, or the side of a square.
            encoder: the encoder's name, up to 256 characters.
            tokens, ttl_s: as for `Client.put`.

        Raises:
            UsageError: as for `lookup` and `Client.put`, or `encoder` is too long or no text.
            UnsupportedLeaf: the embedding is not a valid payload.
        """
        key = self.key(modality, raw)
        payload = embedding_payload(embedding, resolution, encoder)
        if self._cache.contains(key):
            # It need not be copied.
            put = Put(key)
            put.settle("existed")
            return put
        put = self._cache.put(key, payload, tokens=tokens, ttl_s=ttl_s)
        with self._lock:
            if len(self._own) < _OWN_MAX:
                self._own[key] = put
        return put

    def clear(self) -> int:
        """Removes all entries of the namespace, from all clients, and resets the statistics.

        Returns:
            How many entries there were.

        Raises:
            DaemonUnavailable, TimedOut: the daemon did not answer; the statistics are unchanged.
        """
        count = self._cache.clear(self._namespace)
        with self._lock:
            self._reset_statistics()
        return count

    def statistics(self) -> dict[str, float]:
        """Counts since the last `clear`.

        `visual_vram_saved_bytes`: bytes of the embeddings of all hits. `visual_cache_entries`: entries that this object
        stored and that still exist, at most 65,536. `dp_mode_recommendations`: lookups that recommended data parallel.
        """
        with self._lock:
            self._own = {key: put for key, put in self._own.items() if self._counts(key, put)}
            lookups = self._hits + self._misses
            return {
                "visual_cache_hits": self._hits,
                "visual_cache_misses": self._misses,
                "visual_cache_hit_rate": self._hits / lookups if lookups else 0.0,
                "visual_vram_saved_bytes": self._saved_bytes,
                "visual_cache_entries": len(self._own),
                "dp_mode_recommendations": self._recommendations,
            }

    def _counts(self, key: bytes, put: Put) -> bool:
        return put.state == "sent" or (put.state == "stored" and self._cache.contains(key))

    def _reset_statistics(self) -> None:
        self._hits = self._misses = self._saved_bytes = self._recommendations = 0
        self._own = {}

    def after_fork_in_child(self) -> None:
        """The entries belong to the parent, and a thread of the parent may have held the lock. For the library."""
        self._lock = threading.Lock()
        self._reset_statistics()
