"""Embeddings of images, audio and video by their content: looked up, stored within budgets, and counted.

Owns: the key of a picture, what is stored beside its embedding, and the statistics. Does not own the budgets over what
this process stored (budget), nor what the ring keeps: the daemon evicts by its own policy, whatever the budgets say.

Invariants: a lookup sends no message. A store waits for no eviction. Budgets take nothing below the floor, and what
clients hold, or what is on its way, last; leases on what went stay right.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Self, get_args
from weakref import WeakSet

import numpy as np

from ...errors import BelowFloor, ObjectTooLarge, UsageError
from ...shm.header import NODES_MAX
from ..core import requests
from ..core.cache import Client
from ..core.fields import check_count, check_name
from ..core.lease import Lease
from ..core.namespace import Content, Namespace
from ..core.puts import Put
from .budget import Budget, TrackedPut
from .dp_mode import Recommendation, Resolution, check_resolution, recommend_dp_mode
from .measures import array_bytes

if TYPE_CHECKING:
    from ..core.view import Reuse

__all__ = ["VisualCache", "VisualResult", "embedding_bytes"]

Modality = Literal["image", "audio", "video"]

ENTRIES_MAX: Final = 4096
BYTES_MAX: Final = 1 << 30
_LIMIT_MAX: Final = 1 << 62
_ENCODER_CHARS_MAX: Final = 256
_KIND: Final = "visual"


class VisualResult:
    """What a lookup found. On a hit it keeps the entry pinned for as long as it, or a view of the embedding, lives.

    Attributes:
        key: the embedding's key.
        reuse: how many clients hold the entry and how often it was used in all, to about a second; None on a miss.
        created_at: when it was stored, in Unix seconds; None on a miss, or where it was evicted this very moment.
        resolution: (width, height) as it was stored; None on a miss, or where none was given.
        encoder: the encoder's name as it was stored; empty on a miss.
        bytes_saved: size of the embedding that need not be computed again; 0 on a miss.
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
        found: _Found | None,
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
        self.bytes_saved = embedding_bytes(found.embedding) if found is not None else 0
        self._lease = found.lease if found is not None else None
        self._embedding = found.embedding if found is not None else None

    @property
    def hit(self) -> bool:
        """Whether there is an embedding; False once it was released."""
        return self._lease is not None

    @property
    def embedding(self) -> Any:
        """The embedding as it was stored, with read-only numpy views for leaves.

        Raises:
            ValueError: it is a miss, or was released.
        """
        self._held()
        return self._embedding

    def torch(self, *, copy: bool = True) -> Any:
        """The embedding with torch tensors for leaves; `copy` is as in `Lease.torch`.

        Raises:
            ValueError: it is a miss, or was released.
            UnsupportedLeaf: a leaf has a dtype that torch lacks.
        """
        return self._held().torch(copy=copy)["embedding"]

    @property
    def access_count(self) -> int:
        """How often it was used, by all processes, to about a second; 0 on a miss."""
        return 0 if self.reuse is None else self.reuse.uses

    def release(self) -> None:
        """Drops this hold on the entry; views already taken keep theirs."""
        self._lease = self._embedding = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _held(self) -> Lease:
        if self._lease is None:
            raise ValueError("there is no embedding here: the lookup missed, or its result was released")
        return self._lease


@dataclass(frozen=True, slots=True)
class _Found:
    """An entry as `store` makes them."""

    lease: Lease
    embedding: Any
    resolution: tuple[int, int] | None
    encoder: str


class VisualCache:
    """Embeddings by the SHA-256 of the raw bytes that were encoded, in a namespace. Safe to use from several threads.

    The budgets are over what this object stored, least recently used by this object first; what others stored under
    the same namespace is found all the same, and counted nowhere here. What had to go while it was on its way is
    evicted by the first `store`, `statistics` or `clear` after it was stored. A fork's child begins with nothing of its
    own.

    Args:
        cache: the client to go through.
        namespace: what makes two encoders' outputs differ.
        entries_max, bytes_max: budgets; bytes are those of the embeddings' arrays.
        queueing_floor: so many entries are never evicted for the budgets' sake.
        encoder_depth: layers of the vision encoder, for the recommendation; None: not known.

    Raises:
        UsageError: a value out of its range; the message names it.

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
        self._cache = cache
        self._namespace = namespace
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
        _caches.add(self)

    # ---- lookups

    def lookup(
        self, modality: Modality, raw: Content, *, batch_images: int = 1, resolution: Resolution | None = None
    ) -> VisualResult:
        """What is stored for these bytes. Sends no message, and raises nothing because the daemon is away.

        Args:
            raw: the picture's or recording's bytes, before any processing.
            batch_images, resolution: of the batch that it belongs to, for the recommendation. On a hit the stored
                resolution stands in for one that is not given.

        Raises:
            UsageError: no such modality, no bytes, or values that `recommend_dp_mode` refuses.
        """
        key = self.key(modality, raw)
        recommendation = recommend_dp_mode(batch_images, resolution, self._encoder_depth)
        found = _found(self._cache.get(key))
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
        """The key of these bytes' embedding, for the client's other calls.

        Raises:
            UsageError: no such modality, or no bytes.
        """
        if modality not in get_args(Modality):
            raise UsageError(f"modality is {modality!r}; it is one of {', '.join(get_args(Modality))}")
        if not isinstance(raw, bytes | bytearray | memoryview | np.ndarray):
            raise UsageError(f"raw is a {type(raw).__name__}; give the bytes of the picture or recording")
        if isinstance(raw, np.ndarray) and raw.dtype.hasobject:
            raise UsageError(f"raw is an array of dtype {raw.dtype}, which has no bytes of its own; give those")
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
        """Stores an embedding, within the budgets. Returns as `Client.put` does, once it is copied.

        Own entries beyond the budgets are evicted, least recently used first; those that clients hold after them, and
        those on their way last. Where the floor leaves too little to evict, nothing is, and the put is refused.

        Args:
            embedding: a tree as `Client.put` takes it, of any shape and dtype.
            resolution: (width, height) in pixels, or the side of a square.
            encoder: a name for what made it, of up to 256 characters.

        Returns:
            What became of it. Refused by this cache itself, its `error` is ObjectTooLarge (more than `bytes_max`), or
            BelowFloor (the queueing floor leaves no room).

        Raises:
            UsageError: as `lookup` and `Client.put`, or an encoder that is no such text.
            UnsupportedLeaf: the embedding is no payload.
        """
        key = self.key(modality, raw)
        check_name("encoder", encoder, _ENCODER_CHARS_MAX, 0)
        sides = None if resolution is None else list(check_resolution(resolution))
        size_bytes = embedding_bytes(embedding)
        put = Put(key)
        self._evict_due()
        if self._cache.contains(key):
            put.settle("existed")
            return put
        most = self._budget.bytes_max
        if size_bytes > most:
            put.settle(
                "refused", ObjectTooLarge(f"the embedding has {size_bytes} bytes, bytes_max is {most}; raise it")
            )
            return put
        tracked = TrackedPut(size_bytes)
        while True:
            with self._lock:
                other = self._budget.find(key)
                if other is None or not other.is_under_way:
                    try:
                        self._budget.make_room(size_bytes)
                    except BelowFloor as refusal:
                        put.settle("refused", refusal)
                        return put
                    self._budget.add(key, tracked)
                    break
            # Another thread is storing it, and copies for no longer than this one would; or gives up.
            other.begun.wait()
            if other.put is not None:
                return other.put
        body = {"embedding": embedding, "resolution": sides, "encoder": encoder}
        try:
            self._evict_due()
            tracked.put = self._cache.put(key, body, tokens=tokens, ttl_s=ttl_s)
        except BaseException:
            with self._lock:
                if self._budget.find(key) is tracked:
                    self._budget.forget(key)
            raise
        finally:
            tracked.begun.set()
        return tracked.put

    def clear(self) -> int:
        """Removes the namespace's entries, whoever stored them, and sets the statistics to 0.

        Returns:
            How many entries there were.

        Raises:
            DaemonUnavailable, TimedOut: nobody answered; nothing was set to 0.
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
        """So many entries are never evicted for the budgets' sake. At `entries_max` or above, a full cache stores
        nothing more."""
        return self._budget.floor

    @queueing_floor.setter
    def queueing_floor(self, entries: int) -> None:
        self._budget.floor = check_count("queueing_floor", entries, _LIMIT_MAX)

    def follow_floor(self, device: str) -> int:
        """Sets the floor to what the daemon reckons for `device` from `Client.request_arrived` and `request_completed`,
        where a block of a request is one entry of this cache: 0 as long as nothing is known. Asks the daemon.

        Raises:
            DaemonUnavailable, SocketForbidden, TimedOut: why there is no answer; the floor stays.
        """
        check_name("device", device)
        rows = self._cache.status().get("governor", {}).get("devices", [])
        self.queueing_floor = next((row["floor_blocks"] for row in rows if row["device"] == device), 0)
        return self.queueing_floor

    # ---- what there is

    def statistics(self) -> dict[str, float]:
        """What happened since the last `clear`; looks at each own entry once.

        `visual_vram_saved_bytes` sums the embeddings of all hits; `visual_cache_entries` counts what this object stored
        and is still there; `dp_mode_recommendations` counts lookups that recommended data parallel.
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
        """Asserts that the account of what was stored adds up, and is within the budgets."""
        with self._lock:
            self._budget.check_invariants()

    # ---- inside

    def _is_held(self, key: bytes) -> bool:
        reuse = self._cache.reuse(key)
        return reuse is not None and reuse.holders > 0

    def _evict_due(self) -> None:
        """Says what is to go, and waits for no answer. With the daemon away, what stays is the daemon's to evict."""
        with self._lock:
            keys = self._budget.take_due()
        requests.send_evict(self._cache.link, keys)

    def _reset_statistics(self) -> None:
        self._hits = self._misses = self._saved_bytes = self._recommendations = 0

    def after_fork_in_child(self) -> None:
        """What was stored is the parent's, and its lock may be held by a thread that is not here. For the library."""
        self._lock = threading.Lock()
        self._budget.forget_all()
        self._reset_statistics()


def embedding_bytes(tree: Any) -> int:
    """Bytes of a tree's arrays, tensors and byte strings, of any shape, dtype and depth; scalars and text count none.

    What a tree has twice counts twice, as it does when it is stored. A tree that is too large to be stored, or that
    contains itself, is counted as far as one could be stored.
    """
    return array_bytes(tree, nodes_max=NODES_MAX)


def _found(lease: Lease | None) -> _Found | None:
    """What `store` has put; None for what is something else, which only a client that means it can have stored."""
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
    return _Found(lease, body["embedding"], resolution, body["encoder"])


_caches: Final[WeakSet[VisualCache]] = WeakSet()


def _in_child() -> None:
    for cache in list(_caches):
        cache.after_fork_in_child()


os.register_at_fork(after_in_child=_in_child)
