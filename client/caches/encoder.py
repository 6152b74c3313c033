"""An engine's encoder cache: which requests need which outputs, counted in encoder tokens, and their pins in the ring.

Owns: the account of needed and freeable outputs, the order in which freeable ones are evicted, and this engine's pins
of needed ones. Does not own: the outputs. The engine keeps them in its own memory or reads them in the ring, and drops
those that `get_freed_ids` names. An output is identified by its key; so inputs, requests and (through the ring)
processes share it. Requests and their inputs: encoder_request.py.
Invariants: used, freeable and free tokens add up to the cache's size. An output that a request needs is never evicted
here. If it is in the ring, a lease pins it there from `allocate` (or from the first `get_freed_ids` after it was
stored) until no request needs it, so that other engines' puts do not evict it. Only `allocate` evicts. Queries change
nothing. Only `store` sends messages, and no other call waits for one: `store` waits for a place, if the client has
none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import BadConfiguration, ObjectTooLarge, StoreFull, UsageError, shown
from ...ipc.messages.schema import NUMBER_MAX
from ...shm.index.keys import shortened
from ..arguments.checks import check_count
from ..core.client import check_client
from .encoder_request import EncoderInput, EncoderRequest, check_input_id, check_request, check_same, input_of

if TYPE_CHECKING:
    from ..core.client import Client
    from ..reading.lease import Lease
    from ..writing.outcomes import Put


@dataclass(slots=True)
class _Output:
    """An allocated output. `needs`: how many inputs of requests need it. `lease` pins it in the ring while it is needed
    and stored."""

    tokens: int
    needs: int = 0
    lease: Lease | None = None


class EncoderCacheManager:
    """An engine's budget of encoder outputs. Not thread-safe: for the scheduler's thread.

    Each step calls `has_cache`, `can_allocate` and `allocate` for each input that it needs, then `lease`, or the
    encoder and `store`. Call `free_encoder_input` once an input was consumed, `free` when a request ends, and
    `get_freed_ids` once a step.

    Args:
        cache_size: encoder tokens that the engine has memory for, as `compute_encoder_budget` returns them.
        cache: shares outputs with the host's other engines. Without it only this engine's requests share them.

    Raises:
        UsageError: `cache_size` is not a whole number from 0. By each call with a request: it has no such input.
        TokensDiffer: by `has_cache`, `can_allocate` and `allocate`: the key is allocated with another number of tokens.

    Example:
        >>> request = tensord.EncoderRequest("request-1", [tensord.EncoderInput(key, 576)])
        >>> manager = tensord.EncoderCacheManager(2048, cache)
        >>> manager.can_allocate(request, 0, 8192)
        True
        >>> evicted = manager.allocate(request, 0)                 # takes room in the engine's budget
        >>> manager.lease(request, 0) is None                      # a miss: run the encoder
        True
        >>> manager.store(request, 0, np.zeros((576, 64), np.float32), timeout_s=5).wait().state
        'stored'
        >>> manager.free(request)                                  # the request has ended
        >>> manager.free_tokens
        1472
    """

    def __init__(self, cache_size: int, cache: Client | None = None) -> None:
        self.cache_size = check_count("cache_size", cache_size, NUMBER_MAX)
        self._cache = None if cache is None else check_client(cache, "cache")
        self.reset()

    # ---- queries

    @property
    def free_tokens(self) -> int:
        """Tokens without an output."""
        return self.cache_size - sum(output.tokens for output in self._outputs.values())

    @property
    def freeable_tokens(self) -> int:
        """Tokens of outputs that no request needs. They stay until `allocate` evicts them."""
        return sum(output.tokens for output in self._outputs.values() if not output.needs)

    @property
    def used_tokens(self) -> int:
        """Tokens of outputs that requests need."""
        return sum(output.tokens for output in self._outputs.values() if output.needs)

    def has_cache(self, request: EncoderRequest, input_id: int) -> bool:
        """Whether the input's output is allocated in this engine, or in the host's ring now."""
        wanted = input_of(request, input_id)
        return self._known(wanted) is not None or (self._cache is not None and self._cache.contains(wanted.key))

    def can_allocate(
        self, request: EncoderRequest, input_id: int, compute_budget: int, tokens_scheduled: int = 0
    ) -> bool:
        """Whether `allocate` of the input would succeed, after all inputs that the step has scheduled so far.

        An output that is allocated here needs no computing. An output that is only in the ring counts against
        `compute_budget` like a missing one, since it may be evicted before `allocate`. Lower the budget only by the
        inputs that you encode.

        Args:
            compute_budget: encoder tokens that may still be computed in this step.
            tokens_scheduled: encoder tokens of inputs that fit in this step and are not allocated yet.
        """
        wanted = input_of(request, input_id)
        compute_budget = check_count("compute_budget", compute_budget, NUMBER_MAX, -NUMBER_MAX)
        tokens_scheduled = check_count("tokens_scheduled", tokens_scheduled, NUMBER_MAX)
        known = self._known(wanted)
        if known is not None and known.needs:
            return True
        if known is None and wanted.tokens > compute_budget:
            return False
        return wanted.tokens + tokens_scheduled <= self.cache_size - self.used_tokens

    def get_cached_input_ids(self, request: EncoderRequest) -> set[int]:
        """The indices of the request's allocated inputs."""
        request_id = check_request(request).request_id
        return {input_id for of, input_id in self._allocated if of == request_id}

    # ---- allocation

    def allocate(self, request: EncoderRequest, input_id: int) -> list[bytes]:
        """Allocates the input's output, or shares the allocated one, and pins it if it is in the ring.

        Evicts outputs that no request needs, in the order in which they were freed, until there is room.

        Returns:
            The keys of evicted outputs. `get_freed_ids` returns them too.

        Raises:
            UsageError: the index is allocated with another key.
            ObjectTooLarge: the input has more tokens than the cache.
            StoreFull: running requests need the room; nothing changes.
        """
        wanted = input_of(request, input_id)
        known = self._known(wanted)
        allocated = self._allocated.get((request.request_id, input_id))
        if allocated == wanted.key:
            return []
        if allocated is not None:
            raise UsageError(
                f"input {input_id} of request {request.request_id!r} is allocated with key "
                f"{shortened(allocated)}, not {shortened(wanted.key)}; free the request first"
            )
        evicted: list[bytes] = []
        if known is None:
            evicted = self._make_room(request, input_id, wanted.tokens)
            known = self._outputs[wanted.key] = _Output(wanted.tokens)
        known.needs += 1
        self._allocated[request.request_id, input_id] = wanted.key
        if self._cache is not None:
            # Each request counts as a use. The uses keep the entry in the ring once no lease pins it.
            lease = self._cache.get(wanted.key)
            known.lease = lease if lease is not None else known.lease
        return evicted

    def lease(self, request: EncoderRequest, input_id: int) -> Lease | None:
        """A lease on the output in the ring, as an additional pin for the caller. None if the input with this key is
        not allocated for the request, or its output is not in the ring (any more)."""
        wanted = input_of(request, input_id)
        if self._cache is None or self._allocated.get((request.request_id, input_id)) != wanted.key:
            return None
        known = self._outputs[wanted.key]
        if known.lease is None:
            known.lease = self._cache.hold(wanted.key)
        return self._cache.hold(wanted.key)

    def store(self, request: EncoderRequest, input_id: int, tree: Any, *, timeout_s: float = 0.05) -> Put | None:
        """Puts an encoder output into the ring, for all engines. Returns the put once the payload is copied; None
        without a cache. The first `get_freed_ids` after the daemon stored it pins it, if a request still needs it.

        Args:
            tree: as for `Client.put`.
            timeout_s: seconds to wait for room, if the client has none: the first time, and for an output that is
                larger than those before it.

        Raises:
            UnsupportedLeaf: `tree` is not a valid payload.
        """
        wanted = input_of(request, input_id)
        if self._cache is None:
            return None
        put = self._cache.put(wanted.key, tree, tokens=wanted.tokens, timeout_s=timeout_s)
        if (known := self._outputs.get(wanted.key)) is not None:
            # It may pin a former entry of the key, which was removed. The one that is there now is pinned anew.
            known.lease = None
        return put

    # ---- release

    def free_encoder_input(self, request: EncoderRequest, input_id: int) -> None:
        """Ends the request's need of an input. Does nothing if the input is not allocated for it.

        An output that several inputs of the request share is needed until the last of them was freed. An output that no
        request needs loses its pin, and stays until `allocate` evicts it.
        """
        key = self._allocated.pop((check_request(request).request_id, check_input_id(input_id)), None)
        if key is None:
            return
        known = self._outputs[key]
        known.needs -= 1
        if not known.needs:
            known.lease = None
            # Moves to the end.
            self._outputs[key] = self._outputs.pop(key)

    def free(self, request: EncoderRequest) -> None:
        """Ends the request's need of all its inputs. Call it however the request ended."""
        request_id = check_request(request).request_id
        for input_id in [input_id for of, input_id in self._allocated if of == request_id]:
            self.free_encoder_input(request, input_id)

    def get_freed_ids(self) -> list[bytes]:
        """The keys of all outputs that were evicted since the last call, for the engine to drop: each once, oldest
        first, without those that were allocated again. Pins needed outputs that were stored since then."""
        if self._cache is not None:
            # Reads the index only, so it does not wait for the daemon.
            for key, output in self._outputs.items():
                if output.needs and output.lease is None:
                    output.lease = self._cache.hold(key)
        freed = [key for key in self._evicted if key not in self._outputs]
        self._evicted.clear()
        return freed

    def reset(self) -> None:
        """Forgets this engine's outputs, requests and pins. Returns no freed keys: the engine drops all outputs that it
        has. If the weights have changed, call `Client.invalidate` with the namespace, and make new keys."""
        self._outputs: dict[bytes, _Output] = {}
        """Those that no request needs are in the order in which they were freed."""
        self._allocated: dict[tuple[str, int], bytes] = {}
        """By request and input, in the order of their allocation."""
        self._evicted: dict[bytes, None] = {}

    # ---- internal

    def _known(self, wanted: EncoderInput) -> _Output | None:
        known = self._outputs.get(wanted.key)
        if known is not None:
            check_same(wanted, known.tokens)
        return known

    def _make_room(self, request: EncoderRequest, input_id: int, tokens: int) -> list[bytes]:
        room = self.cache_size - self.used_tokens
        if tokens > room:
            needs = f"input {input_id} of request {request.request_id!r} needs {tokens} encoder tokens"
            if tokens > self.cache_size:
                raise ObjectTooLarge(
                    f"{needs}, but the cache has {self.cache_size}; raise cache_size, see compute_encoder_budget"
                )
            raise StoreFull(
                f"{needs}, but only {room} of {self.cache_size} are free or can be freed: running requests need the "
                "rest; call can_allocate first, and schedule the input in a later step"
            )
        evicted: list[bytes] = []
        free_tokens = self.free_tokens
        for key in [key for key, output in self._outputs.items() if not output.needs]:
            if tokens <= free_tokens:
                break
            free_tokens += self._outputs.pop(key).tokens
            evicted.append(key)
            # Move to the end: it may have been evicted before and allocated again.
            self._evicted.pop(key, None)
            self._evicted[key] = None
        return evicted


def compute_encoder_budget(
    tokens_max_by_modality: Mapping[str, int],
    *,
    batch_tokens_max: int,
    compute_tokens: int,
    cache_tokens: int,
    chunked_input: bool = True,
) -> tuple[int, int]:
    """The encoder tokens that an engine needs for a step and for its cache: as configured, but at least one item.

    Args:
        tokens_max_by_modality: the most encoder tokens that one item can have, for each modality that the engine takes.
        batch_tokens_max: tokens in one batch.
        compute_tokens: encoder tokens to compute in a step.
        cache_tokens: encoder tokens to cache.
        chunked_input: whether an item may be spread over batches.

    Returns:
        (compute_budget, cache_size); (0, 0) if the engine takes no such input.

    Raises:
        UsageError: a figure is not a whole number from 0.
        BadConfiguration: an item may not be spread over batches, and can be larger than one.
    """
    compute_tokens = check_count("compute_tokens", compute_tokens, NUMBER_MAX)
    cache_tokens = check_count("cache_tokens", cache_tokens, NUMBER_MAX)
    batch_tokens_max = check_count("batch_tokens_max", batch_tokens_max, NUMBER_MAX)
    if not isinstance(tokens_max_by_modality, Mapping):
        raise UsageError(
            f"tokens_max_by_modality is {shown(tokens_max_by_modality)}; it must be numbers by modality, a dict"
        )
    if not tokens_max_by_modality:
        return 0, 0
    most, modality = max(
        (check_count(f"tokens of {name}", tokens, NUMBER_MAX), name) for name, tokens in tokens_max_by_modality.items()
    )
    if not chunked_input and most > batch_tokens_max:
        raise BadConfiguration(
            f"an item of {modality} can have {most} tokens, but batch_tokens_max is {batch_tokens_max} and chunked "
            f"input is disabled; raise batch_tokens_max to {most}, or enable chunked input"
        )
    return max(compute_tokens, most), max(cache_tokens, most)
