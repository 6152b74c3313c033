"""transformers' language models through the prefix cache: `generate` starts from the longest prefix that a process of
the host has computed.

Owns: one call's sequence of match, prefill with snapshots, generation and put. Does not own: which calls share
and the model's name (families), a cache's layers (caches), blocks (client/prefix).

Invariants: only exceptions of the model are raised by `generate`. A call that cannot share runs as without this module.
The cache that the model continues from holds the bytes that a model of the same name computed for the same tokens.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from transformers.cache_utils import DynamicCache

from ....errors import TensordError, UsageError
from ....ipc.messages.schema import AGENT_NAME_CHARS_MAX
from ...arguments.checks import check_count, check_name, check_timeout
from ...arguments.namespace import Namespace
from ...core.client import Client, check_client
from ...identity.modules import Fingerprint
from ...prefix.cache import BLOCK_TOKENS, PrefixCache
from ...prefix.put import PrefixPut
from ..conditions import NotShared, Reasons
from .caches import State, empty_cache, fill, needs_snapshots, snapshot_of, stored_of, tokens_in
from .families import check_model, name_of, prompt_of, tokens_of

SNAPSHOT_TOKENS: Final = 512
_SNAPSHOT_TOKENS_MAX: Final = 1 << 20
_MATCH_S: Final = 1.0
"""Seconds to wait for a match at most. It takes one round trip, and up to a second after the daemon's start."""
_PUT_S: Final = 1.0
"""Seconds to wait for room, for all blocks of a call."""
_PUTS_MAX: Final = 16
"""The last puts, for which `flush` waits."""


@dataclass(slots=True)
class PrefixTally:
    """Counts of one `PrefixCached`.

    Attributes:
        calls: calls that shared.
        passed: calls that ran without sharing.
        found_tokens: tokens of prompts that were found.
        computed_tokens: tokens of prompts that were computed.
        dropped: caches that were not stored, since the put was refused or lost.
        reasons: why calls ran without sharing, with the number of calls. A reason that is known from the beginning is
            there before the first call.
    """

    calls: int = 0
    passed: int = 0
    found_tokens: int = 0
    computed_tokens: int = 0
    dropped: int = 0
    reasons: Reasons = field(default_factory=Reasons)


class Past(NamedTuple):
    """A cache of transformers, and how many tokens of the prompt it holds."""

    cache: DynamicCache
    tokens: int


def prefix_cached(
    model: Any,
    client: Client,
    *,
    tenant: str = "",
    block_tokens: int = BLOCK_TOKENS,
    snapshot_tokens: int = SNAPSHOT_TOKENS,
    agent: str = "",
) -> PrefixCached:
    """Returns an object whose `generate` starts from the longest cached prefix. Does not change the model. One line in
    the log says why, if no call of this model can be shared with the installed transformers.

    Args:
        model: a language model of transformers, of a family in docs/transformers.md.
        client: the client whose daemon keeps the blocks.
        tenant: a salt that makes a tenant's blocks its own.
        block_tokens: tokens of a block, as of `PrefixCache`.
        snapshot_tokens: for models with sliding windows or recurrent states: how many tokens lie between two positions
            of a prompt at which another prompt can continue. The prompt is computed in parts that end there.
        agent: the agent that the sequences belong to.

    Raises:
        UsageError: the model has no `generate`, `client` is no Client, or `snapshot_tokens` or `agent` is out of its
            range.
        BadPrefix: `block_tokens` is not a power of two from 16 to 4096.
        BadNamespace: `tenant` is no text.
    """
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "generate"):
        raise UsageError(f"model is a {type(model).__name__}; give a language model of transformers, with generate()")
    return PrefixCached(model, client, tenant, block_tokens, snapshot_tokens, agent)


class PrefixCached:
    """A language model whose prompts start from the longest prefix that any process of the host has computed.
    Thread-safe as far as the model is. `prefix_cached` makes it.

    Example:
        from tensord.client.transformers import prefix_cached

        shared = prefix_cached(model, tensord.Client())
        output = shared.generate(**tokenizer("…", return_tensors="pt"), max_new_tokens=20)
    """

    def __init__(
        self, model: Any, client: Client, tenant: str, block_tokens: int, snapshot_tokens: int, agent: str
    ) -> None:
        self._model = model
        self._client = check_client(client)
        self._tenant = tenant
        self._block_tokens = block_tokens
        self._snapshot_tokens = check_count("snapshot_tokens", snapshot_tokens, _SNAPSHOT_TOKENS_MAX, 1)
        self._agent = agent
        self._cache_name = ""  # until the model is known to be one that shares
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._fingerprint = Fingerprint()
        self._cache: PrefixCache | None = None  # as the last call that shared made it
        self.tally = PrefixTally()
        self._puts: deque[PrefixPut] = deque(maxlen=_PUTS_MAX)
        check_name("agent", agent, AGENT_NAME_CHARS_MAX, least=0)
        # Checks block_tokens and tenant now rather than at the first call.
        namespace = Namespace(model="none", revision="none", dtype="none", processor="none", tenant=tenant)
        PrefixCache(client, namespace, block_tokens=block_tokens)
        try:
            self._check()
        except Exception as error:
            self.tally.reasons.tell(error, f"prompts of {type(model).__name__} are not shared")

    @property
    def namespace(self) -> Namespace | None:
        """The namespace of the blocks, as the last call that shared made it. None before the first one."""
        return None if self._cache is None else self._cache.namespace

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Does what `model.generate` does, with the same arguments and the same result. Computes only the part of the
        prompt after the longest cached prefix, and stores the sequence afterwards.

        A call that cannot be shared runs as `model.generate`; `tally.reasons` says why.
        """
        began_s = time.perf_counter()
        try:
            self._check()
            ids = prompt_of(self._model, args, kwargs)
            (cache, found), prefixes = self._started(ids)
        except Exception as error:
            self._passed(error)
            return self._model.generate(*args, **kwargs)
        snapshots = self._prefilled(ids, cache, found)
        output = self._model.generate(*args, **{**kwargs, self._cache_name: cache})
        self._count(found, ids.shape[1])
        cost_ms = (time.perf_counter() - began_s) * 1000
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        self._keep(prefixes, sequences, cache, snapshots, cost_ms)
        return output

    def past_key_values(self, input_ids: torch.Tensor) -> Past:
        """Returns the longest cached prefix of a prompt as a cache, for a loop of your own. Its memory belongs to the
        caller. At least one token remains to be computed.

        Args:
            input_ids: the tokens of one prompt, of shape (1, n).

        Returns:
            The cache, and how many tokens it holds. Without a match, or for a model that cannot share: an empty cache,
            and 0.

        Example:
            cache, found = shared.past_key_values(input_ids)
            output = model(input_ids=input_ids[:, found:], cache=cache, use_cache=True)  # transformers 5.24 and newer
            shared.store(input_ids, cache)
        """
        try:
            past, _ = self._started(input_ids)
        except Exception as error:
            self._passed(error)
            return Past(DynamicCache(config=self._model.config.get_text_config(decoder=True)), 0)
        self._count(past.tokens, input_ids.shape[-1])
        return past

    def store(self, input_ids: torch.Tensor, cache: Any) -> bool:
        """Stores a cache. The caller may go on using it.

        Args:
            input_ids: the tokens that the cache holds, of shape (1, n).
            cache: the model's cache, a DynamicCache.

        Returns:
            Whether it is stored as far as known so far; `tally.reasons` says why not.
        """
        try:
            return self._keep(self._prefixes(input_ids), input_ids, cache, {}, 0.0)
        except Exception as error:
            self._passed(error)
            return False

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until everything that was given to the daemon so far is stored, or lost.

        Args:
            timeout_s: seconds to wait at most. Default: the client's `timeout_s`.

        Returns:
            Whether that was so in time.
        """
        limit_s = check_timeout(timeout_s, self._client.timeout_s)
        deadline = time.monotonic() + limit_s
        try:
            for put in list(self._puts):
                put.wait_until(deadline, limit_s)
        except TensordError:
            return False
        return True

    # ---- before

    def _check(self) -> None:
        """Raises NotShared, once, if the installed transformers lacks what sharing needs for this model."""
        self._cache_name = self._cache_name or check_model(self._model)

    def _started(self, input_ids: torch.Tensor) -> tuple[Past, PrefixCache]:
        """A cache with the longest cached prefix, and what stores the rest."""
        prefixes = self._prefixes(input_ids)
        cache = empty_cache(self._model)
        match = prefixes.match(tokens_of(input_ids), agent=self._agent, timeout_s=min(_MATCH_S, self._client.timeout_s))
        if match is None:
            return Past(cache, 0), prefixes
        with match:
            try:
                fill(cache, match, input_ids.device)
            except (NotShared, TensordError) as error:
                self.tally.reasons.add(error, "a cached prefix is not used")
                return Past(empty_cache(self._model), 0), prefixes
            return Past(cache, match.offset), prefixes

    def _prefixes(self, input_ids: torch.Tensor) -> PrefixCache:
        """The prefix cache of the model as it is now, at the present generation of its namespace."""
        self._check()
        namespace = self._client.current(name_of(self._model, input_ids, self._fingerprint, self._tenant))
        prefixes = self._cache
        if prefixes is None or prefixes.namespace != namespace:
            prefixes = self._cache = PrefixCache(self._client, namespace, block_tokens=self._block_tokens)
        return prefixes

    def _prefilled(self, ids: torch.Tensor, cache: DynamicCache, found: int) -> dict[int, State]:
        """Computes the prompt up to the last position at which other prompts may continue, and keeps the state at each
        such position. Without layers that need it, and without a daemon, `generate` computes all."""
        if not self._client.connected or not needs_snapshots(cache):
            return {}
        snapshots: dict[int, State] = {}
        more: dict[str, Any] = {"logits_to_keep": 1} if self._keeps_logits else {}
        step, last = self._snapshot_tokens, ids.shape[1] - 1
        with torch.no_grad():
            for stop in range(found - found % step + step, last + 1, step):
                self._model(input_ids=ids[:, found:stop], use_cache=True, **{self._cache_name: cache, **more})
                snapshots[stop] = snapshot_of(cache)
                found = stop
        return snapshots

    # ---- after

    def _keep(
        self, prefixes: PrefixCache, ids: torch.Tensor, cache: Any, snapshots: dict[int, State], cost_ms: float
    ) -> bool:
        try:
            tokens = tokens_of(ids)
            held = tokens_in(cache)
            if not 0 < held <= len(tokens):
                raise NotShared(f"the cache holds {held} tokens, but there are {len(tokens)}")
            layers, states = stored_of(cache, held, snapshots)
            if self._prefixes(ids).namespace != prefixes.namespace:
                raise NotShared("the model's weights or settings changed, or its namespace was invalidated meanwhile")
            more: dict[str, Any] = {"agent": self._agent, "cost_ms": cost_ms, "timeout_s": _PUT_S}
            put = prefixes.put(tokens[:held], layers, snapshots=states, **more)
        except Exception as error:
            self._passed(error, stored=False)
            return False
        self._puts.append(put)
        is_dropped = put.state in ("refused", "lost")
        self.tally.dropped += is_dropped
        return not is_dropped

    def _count(self, found: int, tokens: int) -> None:
        self.tally.calls += 1
        self.tally.found_tokens += found
        self.tally.computed_tokens += tokens - found

    def _passed(self, error: Exception, *, stored: bool = True) -> None:
        self.tally.passed += stored
        what = "generated without the prefix cache" if stored else "not stored in the prefix cache"
        self.tally.reasons.add(error, what)
