"""Embeddings of images, audio and video, by a hash of their raw bytes: looked up, stored within budgets, and counted.

Owns: the key of an image, and the statistics. Does not own: what is stored for an embedding (visual_result.py), the
budgets over this process's entries (budget.py), nor the ring. The daemon evicts by its own policy, whatever the budgets
say.
Invariants: a lookup sends no message. A store waits for no eviction. The budgets evict nothing below the floor; entries
that clients hold come after others, and entries whose put is in flight come last. Leases on evicted entries stay valid.
"""

from __future__ import annotations

import threading
from typing import Any, Final, Literal, get_args

import numpy as np

from ...errors import BelowFloor, ObjectTooLarge, UsageError, shown
from ..arguments.checks import check_count, check_name
from ..arguments.namespace import Content, Namespace, check_namespace
from ..core.client import Client, check_client
from ..threads import forks
from ..writing.outcomes import Put
from .budget import Budget, TrackedPut
from .dp_mode import Resolution, recommend_dp_mode
from .measures import array_bytes
from .visual_result import VisualResult, embedding_payload, stored_embedding

Modality = Literal["image", "audio", "video"]

ENTRIES_MAX: Final = 4096
BYTES_MAX: Final = 1 << 30
_LIMIT_MAX: Final = 1 << 62
_KIND: Final = "visual"


class VisualCache:
    """Embeddings by the SHA-256 of the raw bytes that were encoded, in a namespace. Thread-safe.

    The budgets cover the entries that this object stored, least recently used by this object first. Entries that others
    stored under the namespace are found, and counted in no budget. An entry that is dropped while its put is in flight
    is evicted by the first `store`, `statistics` or `clear` after it was stored. The child of a fork starts with an
    empty budget.

    Args:
        cache: the client to use.
        namespace: what makes two encoders' outputs differ.
        entries_max, bytes_max: the budgets. Bytes are those of the embeddings' arrays.
        queueing_floor: how many entries the budgets never evict.
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

    def __init__(
        self,
        cache: Client,
        namespace: Namespace,
        *,
        entries_max: int = ENTRIES_MAX,
        bytes_max: int = BYTES_MAX,
        queueing_floor: int = 0,
        encoder_depth: int | None = None,
    ) -> None:
        self._cache = check_client(cache, "cache")
        self._namespace = check_namespace(namespace)
        self._budget = Budget(
            check_count("entries_max", entries_max, _LIMIT_MAX, 1),
            check_count("bytes_max", bytes_max, _LIMIT_MAX, 1),
            cache.contains,
            self._is_held,
        )
        self.queueing_floor = queueing_floor
        recommend_dp_mode(1, None, encoder_depth)
        self._encoder_depth = encoder_depth
        self._lock = threading.Lock()
        self._reset_statistics()
        forks.follow(self, forks.Place.VISUAL_CACHES)

    # ---- lookups

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
            if result.hit:
                self._hits += 1
                self._saved_bytes += result.bytes_saved
                self._budget.touch(key)
            else:
                self._misses += 1
            if result.recommendation is not None and result.recommendation.use_dp:
                self._recommendations += 1
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

    # ---- stores

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
        """Stores an embedding, within the budgets. Returns once it is copied.

        Beyond the budgets, entries of this object are evicted: least recently used first, then entries that clients
        hold, then entries whose put is in flight. If the floor leaves too few entries to evict, none is evicted and the
        put is refused.

        Args:
            embedding: a tree as `Client.put` takes it, of any shape and dtype.
            resolution: (width, height) in pixels, or the side of a square.
            encoder: the encoder's name, up to 256 characters.
            tokens, ttl_s: as for `Client.put`.

        Returns:
            The put. If this cache refused it, `error` is ObjectTooLarge (more than `bytes_max`) or BelowFloor (the
            queueing floor leaves no room).

        Raises:
            UsageError: as for `lookup` and `Client.put`, or `encoder` is too long or no text.
            UnsupportedLeaf: the embedding is not a valid payload.
        """
        key = self.key(modality, raw)
        payload = embedding_payload(embedding, resolution, encoder)
        tracked = TrackedPut(array_bytes(embedding))
        put = Put(key)
        self._evict_due()
        if self._cache.contains(key):
            put.settle("existed")
            return put
        other = self._entered(put, tracked)
        if other is not None:
            return other
        try:
            self._evict_due()
            tracked.put = self._cache.put(key, payload, tokens=tokens, ttl_s=ttl_s)
        except BaseException:
            with self._lock:
                if self._budget.find(key) is tracked:
                    self._budget.forget(key)
            raise
        finally:
            tracked.begun.set()
        return tracked.put

    def _entered(self, put: Put, tracked: TrackedPut) -> Put | None:
        """Enters an entry into the account before it is stored. Returns None if the caller has to store it; otherwise
        `put`, refused, or the put of another thread that stores it.
        """
        size_bytes, most = tracked.size_bytes, self._budget.bytes_max
        if size_bytes > most:
            put.settle(
                "refused", ObjectTooLarge(f"the embedding has {size_bytes} bytes, bytes_max is {most}; raise it")
            )
            return put
        while True:
            with self._lock:
                other = self._budget.find(put.key)
                if other is None or not other.is_under_way:
                    try:
                        self._budget.make_room(size_bytes)
                    except BelowFloor as refusal:
                        put.settle("refused", refusal)
                        return put
                    self._budget.add(put.key, tracked)
                    return None
            # Another thread is storing it. Waiting for its copy takes no longer than a second copy; or it gives up.
            other.begun.wait()
            if other.put is not None:
                return other.put

    def clear(self) -> int:
        """Removes all entries of the namespace, from all clients, and resets the statistics.

        Returns:
            How many entries there were.

        Raises:
            DaemonUnavailable, TimedOut: the daemon did not answer; the statistics are unchanged.
        """
        count = self._cache.clear(self._namespace)
        with self._lock:
            self._budget.drop_all()
            self._reset_statistics()
        self._evict_due()
        return count

    # ---- the floor

    @property
    def queueing_floor(self) -> int:
        """How many entries the budgets never evict. At `entries_max` or more, a full cache refuses every put."""
        return self._budget.floor

    @queueing_floor.setter
    def queueing_floor(self, entries: int) -> None:
        self._budget.floor = check_count("queueing_floor", entries, _LIMIT_MAX)

    def follow_floor(self, device: str) -> int:
        """Sets the floor to the one that the daemon computes for `device`, and returns it. Asks the daemon.

        The daemon computes it from `Client.request_arrived` and `request_completed`; each block of a request stands for
        one entry of this cache. 0 while the daemon has no such reports.

        Raises:
            UsageError: `device` is not a valid name.
            DaemonUnavailable, SocketForbidden, TimedOut: the daemon did not answer; the floor stays.
        """
        check_name("device", device)
        rows = self._cache.status().get("governor", {}).get("devices", [])
        self.queueing_floor = next((row["floor_blocks"] for row in rows if row["device"] == device), 0)
        return self.queueing_floor

    # ---- statistics

    def statistics(self) -> dict[str, float]:
        """Counts since the last `clear`. Looks at each of this object's entries once.

        `visual_vram_saved_bytes`: bytes of the embeddings of all hits. `visual_cache_entries`: entries that this object
        stored and that still exist. `dp_mode_recommendations`: lookups that recommended data parallel.
        """
        self._evict_due()
        with self._lock:
            self._budget.forget_gone()
            lookups = self._hits + self._misses
            return {
                "visual_cache_hits": self._hits,
                "visual_cache_misses": self._misses,
                "visual_cache_hit_rate": self._hits / lookups if lookups else 0.0,
                "visual_vram_saved_bytes": self._saved_bytes,
                "visual_cache_entries": len(self._budget),
                "dp_mode_recommendations": self._recommendations,
            }

    @property
    def own_bytes(self) -> int:
        """Bytes of embeddings that count against `bytes_max`."""
        return self._budget.bytes

    def check_invariants(self) -> None:
        """Asserts that the account is the sum of its entries, and within the budgets."""
        with self._lock:
            self._budget.check_invariants()

    # ---- internal

    def _is_held(self, key: bytes) -> bool:
        reuse = self._cache.reuse(key)
        return reuse is not None and reuse.holders > 0

    def _evict_due(self) -> None:
        """Sends evictions that are due, and waits for no answer. Without a daemon the entries stay, until the daemon
        evicts them by its own policy.
        """
        with self._lock:
            keys = self._budget.take_due()
        self._cache.link.puts.evict(keys)

    def _reset_statistics(self) -> None:
        self._hits = self._misses = self._saved_bytes = self._recommendations = 0

    def after_fork_in_child(self) -> None:
        """The entries belong to the parent, and a thread of the parent may have held the lock. For the library."""
        self._lock = threading.Lock()
        self._budget.forget_all()
        self._reset_statistics()
