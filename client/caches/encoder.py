"""What an engine has of encoders' outputs, counted in encoder tokens, and what of it is pinned in the host's ring.

Owns: which requests need which outputs, in which order those that nobody needs go, and this engine's pins of those that
somebody needs. Does not own the outputs: the engine keeps them in its own memory, or reads them in the ring, and drops
what `get_freed_ids` names. An output is known by its key, so that inputs of one request, requests, and by way of the
ring processes share it.

Invariants: tokens that requests need, tokens that can be freed and free tokens add up to the cache's size. An output
that a request needs is never evicted here; where it stands in the ring it is pinned, by a lease, from `allocate` (or
from the first call after it was stored) until no request needs it, so that no other engine's puts evict it there. Only
`allocate` evicts. Queries change nothing. Nothing here sends a message but `store`, and nothing waits for an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import BadConfiguration, ObjectTooLarge, StoreFull, TokensDiffer, UsageError
from ...ipc.schema import NUMBER_MAX
from ..core.fields import check_count, check_key

if TYPE_CHECKING:
    from ..core.cache import Client
    from ..core.lease import Lease
    from ..core.puts import Put


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One picture, sound or video of a request.

    Args:
        key: 32 bytes that name the content and the encoder, as `Namespace.key` makes them.
        tokens: how many embeddings the encoder makes of it.

    Raises:
        BadKey: not 32 bytes.
        UsageError: `tokens` is no whole number from 0 up.

    Example:
        >>> tensord.EncoderInput(key, 576).tokens
        576
    """

    key: bytes
    tokens: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", check_key(self.key))
        object.__setattr__(self, "tokens", check_count("tokens", self.tokens, NUMBER_MAX))


@dataclass(frozen=True, slots=True)
class EncoderRequest:
    """A request and its inputs, which are named by their index. Two of them may be the same.

    Raises:
        TokensDiffer: two inputs have one key and two token counts.

    Example:
        >>> request = tensord.EncoderRequest("request-1", [tensord.EncoderInput(key, 576)])
        >>> len(request.inputs)
        1
    """

    request_id: str
    inputs: Sequence[EncoderInput]

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))
        known: dict[bytes, int] = {}
        for given in self.inputs:
            _check_same(given, known.setdefault(given.key, given.tokens))


@dataclass(slots=True)
class _Output:
    """`requests` need it; `lease` pins it in the ring while there are any, and it is there."""

    tokens: int
    requests: set[str] = field(default_factory=set)
    lease: Lease | None = None


class EncoderCacheManager:
    """An engine's budget of encoder outputs. For one thread, the scheduler's.

    A step goes `has_cache`, `can_allocate`, `allocate` for each input that it is going to need, then `lease`, or the
    encoder and `store`; `free_encoder_input` once an input was consumed, `free` when a request ends, and once a step
    `get_freed_ids`.

    Args:
        cache_size: encoder tokens that the engine has memory for, as `compute_encoder_budget` gives them.
        cache: shares outputs with the host's other engines; without it only this engine's requests share them.

    Raises:
        UsageError: `cache_size` is no whole number from 0 up.

    Example:
        >>> request = tensord.EncoderRequest("request-1", [tensord.EncoderInput(key, 576)])
        >>> manager = tensord.EncoderCacheManager(2048, cache)
        >>> manager.can_allocate(request, 0, 8192)
        True
        >>> evicted = manager.allocate(request, 0)                 # takes room in the engine's budget
        >>> manager.lease(request, 0) is None                      # a miss: run the encoder
        True
        >>> manager.store(request, 0, np.zeros((576, 64), np.float32)).wait().state
        'stored'
        >>> manager.free(request)                                  # the request has ended
        >>> manager.free_tokens
        1472
    """

    def __init__(self, cache_size: int, cache: Client | None = None) -> None:
        self.cache_size = check_count("cache_size", cache_size, NUMBER_MAX)
        self._cache = cache
        self._begin()

    # ---- queries

    @property
    def free_tokens(self) -> int:
        """Tokens that nothing takes."""
        return self._free

    @property
    def freeable_tokens(self) -> int:
        """Tokens of outputs that no request needs, and that stay until `allocate` wants their room."""
        return self._freeable_tokens

    @property
    def used_tokens(self) -> int:
        """Tokens of outputs that requests need."""
        return self.cache_size - self._free - self._freeable_tokens

    def has_cache(self, request: EncoderRequest, input_id: int) -> bool:
        """Whether the input was encoded: its output was allocated in this engine, or stands in the host's ring now.

        Raises:
            UsageError: the request has no such input.
            TokensDiffer: it is allocated with another number of tokens.
        """
        wanted = _input(request, input_id)
        return self._known(wanted) is not None or (self._cache is not None and self._cache.contains(wanted.key))

    def can_allocate(
        self, request: EncoderRequest, input_id: int, compute_budget: int, tokens_scheduled: int = 0
    ) -> bool:
        """Whether `allocate` of the input would find room, after all that the step has scheduled so far.

        What is allocated here already needs no computing. What only the ring has counts against the compute budget like
        any other, since it may be gone from there by the time of `allocate`; lower the budget only by what you encode.

        Args:
            compute_budget: encoder tokens that may still be computed in this step.
            tokens_scheduled: encoder tokens of inputs that were found to fit in this step, and are not yet allocated.

        Raises:
            UsageError, TokensDiffer: as for `has_cache`.
        """
        wanted = _input(request, input_id)
        known = self._known(wanted)
        if known is not None and known.requests:
            return True
        if known is None and wanted.tokens > compute_budget:
            return False
        return wanted.tokens + tokens_scheduled <= self._free + self._freeable_tokens

    def get_cached_input_ids(self, request: EncoderRequest) -> set[int]:
        """The inputs that are allocated for the request."""
        return set(self._allocated.get(request.request_id, ()))

    # ---- what a request needs

    def allocate(self, request: EncoderRequest, input_id: int) -> list[bytes]:
        """Takes room for the input's output, or shares the one that is there, and pins it if the ring has it.

        Outputs that no request needs make room, the one that was freed first goes first.

        Returns:
            The keys of those that went, which `get_freed_ids` is going to name too.

        Raises:
            UsageError: the request has no such input, or another one is allocated under its index.
            TokensDiffer: as for `has_cache`.
            ObjectTooLarge: it has more tokens than the cache.
            StoreFull: running requests need the room. Nothing has changed.
        """
        wanted = _input(request, input_id)
        known = self._known(wanted)
        allocated = self._allocated.get(request.request_id, {})
        if input_id in allocated:
            if allocated[input_id] != wanted.key:
                raise UsageError(
                    f"input {input_id} of request {request.request_id!r} is allocated with key "
                    f"{allocated[input_id].hex()[:16]}…, not {wanted.key.hex()[:16]}…; free the request first"
                )
            return []
        went: list[bytes] = []
        if known is None:
            went = self._make_room(request, input_id, wanted.tokens)
            known = self._outputs[wanted.key] = _Output(wanted.tokens)
            self._free -= wanted.tokens
        elif not known.requests:
            del self._freeable[wanted.key]
            self._freeable_tokens -= wanted.tokens
        known.requests.add(request.request_id)
        self._allocated.setdefault(request.request_id, {})[input_id] = wanted.key
        if self._cache is not None:
            # Every request counts as a use, which is what keeps an entry in the ring when nobody pins it any more.
            lease = self._cache.get(wanted.key)
            known.lease = lease if lease is not None else known.lease
            self._pin_stored(self._cache)
        return went

    def lease(self, request: EncoderRequest, input_id: int) -> Lease | None:
        """The output as the ring has it, pinned once more for the caller.

        Returns:
            None where the input, with this key, is not allocated for the request, or its output is not in the ring
            (any more).

        Raises:
            UsageError: the request has no such input.
        """
        wanted = _input(request, input_id)
        if self._cache is None or self._allocated.get(request.request_id, {}).get(input_id) != wanted.key:
            return None
        known = self._outputs[wanted.key]
        self._pin_stored(self._cache)
        if known.lease is None and self._cache.contains(wanted.key):
            known.lease = self._cache.get(wanted.key)
        return self._cache.hold(wanted.key)

    def store(self, request: EncoderRequest, input_id: int, tree: Any, *, timeout_s: float = 0.0) -> Put | None:
        """Puts what was encoded into the ring, for everybody. Returns once it is copied out of `tree`.

        It is pinned by the first call after the daemon has stored it, if a request needs it then.

        Args:
            tree: as for `Client.put`.
            timeout_s: how long room in the inbox may take; with 0 the put is lost where there is none. A payload over
                half of the inbox needs some time, as it goes in pieces.

        Returns:
            What became of it; None without a cache.

        Raises:
            UsageError: the request has no such input.
            UnsupportedLeaf: `tree` is no payload.
        """
        wanted = _input(request, input_id)
        if self._cache is None:
            return None
        put = self._cache.put(wanted.key, tree, tokens=wanted.tokens, timeout_s=timeout_s)
        self._stored[wanted.key] = put
        self._pin_stored(self._cache)
        return put

    # ---- what it needs no more

    def free_encoder_input(self, request: EncoderRequest, input_id: int) -> None:
        """The request needs the input no more; what is not allocated for it is passed over.

        An item that the request has several times is needed until the last of them was freed. What no request needs
        keeps its place, without a pin, until `allocate` wants it.
        """
        allocated = self._allocated.get(request.request_id)
        key = allocated.pop(input_id, None) if allocated is not None else None
        if allocated is None or key is None:
            return
        if not allocated:
            del self._allocated[request.request_id]
        elif key in allocated.values():
            return
        known = self._outputs[key]
        known.requests.discard(request.request_id)
        if not known.requests:
            known.lease = None
            self._freeable[key] = None
            self._freeable_tokens += known.tokens

    def free(self, request: EncoderRequest) -> None:
        """The request has ended, however that was: it needs none of its inputs."""
        for input_id in list(self._allocated.get(request.request_id, ())):
            self.free_encoder_input(request, input_id)

    def get_freed_ids(self) -> list[bytes]:
        """The keys of all that was evicted since the last call, for the engine to drop: each once, oldest first.

        What was evicted and has been allocated again is not among them.
        """
        if self._cache is not None:
            self._pin_stored(self._cache)
        freed = [key for key in self._evicted if key not in self._outputs]
        self._evicted.clear()
        return freed

    def reset(self) -> None:
        """Forgets all outputs, requests and pins, and names nothing as freed: the engine drops all that it has.

        That is for this engine. When the weights have changed, `Client.invalidate` the namespace, and make new keys.
        """
        self._begin()

    # ---- inside

    def _begin(self) -> None:
        self._outputs: dict[bytes, _Output] = {}
        self._allocated: dict[str, dict[int, bytes]] = {}
        # In the order in which they were freed; only the keys matter.
        self._freeable: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}
        self._stored: dict[bytes, Put] = {}
        self._free = self.cache_size
        self._freeable_tokens = 0

    def _known(self, wanted: EncoderInput) -> _Output | None:
        known = self._outputs.get(wanted.key)
        if known is not None:
            _check_same(wanted, known.tokens)
        return known

    def _make_room(self, request: EncoderRequest, input_id: int, tokens: int) -> list[bytes]:
        room = self._free + self._freeable_tokens
        if tokens > room:
            needs = f"input {input_id} of request {request.request_id!r} needs {tokens} encoder tokens"
            if tokens > self.cache_size:
                raise ObjectTooLarge(
                    f"{needs}, and the cache has {self.cache_size}: give it more, as compute_encoder_budget says"
                )
            raise StoreFull(
                f"{needs}, and {room} of {self.cache_size} are free or can be freed: running requests need the rest; "
                "ask can_allocate, and schedule it in a later step"
            )
        went: list[bytes] = []
        while tokens > self._free:
            key = next(iter(self._freeable))
            del self._freeable[key]
            freed = self._outputs.pop(key).tokens
            self._freeable_tokens -= freed
            self._free += freed
            went.append(key)
            # At the end, though it may have been evicted before and allocated again.
            self._evicted.pop(key, None)
            self._evicted[key] = None
        return went

    def _pin_stored(self, cache: Client) -> None:
        """Pins what was stored meanwhile and is needed, as the index has it: nobody waits for the daemon's word."""
        for key, put in list(self._stored.items()):
            # Before the lookup: what was stored by now is found, or has gone for good.
            settled = put.state != "sent"
            known = self._outputs.get(key)
            lease = cache.hold(key) if known is not None and known.requests else None
            if known is not None and lease is not None:
                # Whatever was pinned before may be what somebody has removed, and this replaces.
                known.lease = lease
            if settled or lease is not None:
                del self._stored[key]


def compute_encoder_budget(
    tokens_max_by_modality: Mapping[str, int],
    *,
    batch_tokens_max: int,
    compute_tokens: int,
    cache_tokens: int,
    chunked_input: bool = True,
) -> tuple[int, int]:
    """The encoder tokens an engine needs for a step, and for its cache: as configured, and never less than one item.

    Args:
        tokens_max_by_modality: the most encoder tokens one item can have, by each modality that the engine takes.
        batch_tokens_max: tokens in one batch.
        compute_tokens: encoder tokens that are to be computed in a step.
        cache_tokens: encoder tokens that are to be cached.
        chunked_input: whether an item may be spread over batches.

    Returns:
        (compute_budget, cache_size); (0, 0) where the engine takes no such input.

    Raises:
        UsageError: a figure that is no whole number from 0 up.
        BadConfiguration: an item may not be spread over batches, and can be larger than one.
    """
    compute_tokens = check_count("compute_tokens", compute_tokens, NUMBER_MAX)
    cache_tokens = check_count("cache_tokens", cache_tokens, NUMBER_MAX)
    batch_tokens_max = check_count("batch_tokens_max", batch_tokens_max, NUMBER_MAX)
    if not tokens_max_by_modality:
        return 0, 0
    most, modality = max(
        (check_count(f"tokens of {name}", tokens, NUMBER_MAX), name) for name, tokens in tokens_max_by_modality.items()
    )
    if not chunked_input and most > batch_tokens_max:
        raise BadConfiguration(
            f"one item of {modality} can have {most} tokens, and batch_tokens_max is {batch_tokens_max} while chunked "
            f"input is disabled: it could never run; raise batch_tokens_max to {most}, or enable chunked input"
        )
    return max(compute_tokens, most), max(cache_tokens, most)


def _input(request: EncoderRequest, input_id: int) -> EncoderInput:
    """Raises UsageError for an index that the request does not have; none counts from the end."""
    inputs = request.inputs
    if not 0 <= input_id < len(inputs):
        raise UsageError(f"input {input_id} of request {request.request_id!r}: it has {len(inputs)}, counted from 0")
    return inputs[input_id]


def _check_same(wanted: EncoderInput, tokens: int) -> None:
    if wanted.tokens != tokens:
        raise TokensDiffer(
            f"key {wanted.key.hex()[:16]}… has {tokens} tokens, and {wanted.tokens} are asked for: one key is one "
            "content and one encoder; make keys with Namespace.key, of the content itself"
        )
