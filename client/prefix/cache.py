"""Sequences of tokens and what a model's layers keep of them: the longest cached prefix, pictures included.

Owns: the public calls, and the question to the daemon. Does not own what matches (the daemon's index does), how layers
are cut into blocks (prefix_layers), nor a sequence's way there (prefix_put).

Invariants: what a match gives is exact to the token, agrees in its media, and every layer can go on from there. Without
a daemon, or with one that does not answer in time, a match is a miss and a put is lost; neither raises for that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from ...errors import BadPrefix, Corrupt, LimitReached, Refusal, UsageError
from ...ipc import messages
from ...ipc.schema import AGENT_NAME_CHARS_MAX, BLOCKS_MAX
from ...shm.layout import KEY_BYTES
from ...shm.prefix import (
    BLOCK_TOKENS_MAX,
    BLOCK_TOKENS_MIN,
    Media,
    Tokens,
    kept,
    uncut,
)
from ..core import requests
from ..core.fields import check_count, check_name, check_timeout
from ..core.namespace import Namespace
from ..core.put_options import PutOptions
from ..core.puts import Put
from .device import DeviceSequences
from .layers import PrefixLayer, Snapshots, layers_of
from .match import HeldBlocks, PrefixMatch
from .paged import PER_SEQUENCE, PagedSnapshots
from .put import PrefixPut, PrefixSequence, store
from .query import Asker
from .tokens import GivenMedia, GivenTokens, media_of, tokens_of

if TYPE_CHECKING:
    from ..core.cache import Client
    from ..core.lease import Lease
    from ..device.cache import DeviceCache

BLOCK_TOKENS: Final = 256
_SEQUENCES_MAX: Final = 1 << 20
# A match, if what the daemon found has gone before it is pinned.
_ASKED: Final = 2
_OFF: Final = "this prefix cache is switched off: set enabled"
_BLOCK_SIZES: Final = [1 << shift for shift in range(BLOCK_TOKENS_MIN.bit_length() - 1, BLOCK_TOKENS_MAX.bit_length())]


class PrefixCache:
    """What was computed for sequences of tokens, to go on from. Safe to use from several threads.

    Args:
        client: its daemon keeps the blocks, for all processes of the host.
        namespace: what makes two models' layers differ.
        block_tokens: tokens of a block, a power of two from 16 to 4096. Sequences share whole blocks; those of caches
            with another number do not meet in blocks, though in matches.
        n_on_device: so many sequences stay on the device; the oldest above it are offloaded to the host.
        device: where they stay: sequences whose arrays lie there. Without it all go to the host.
        enabled: whether anything is stored and matched; `enabled` may be set at any time.

    Raises:
        BadPrefix: `block_tokens` is no such number.
        UsageError: `n_on_device` is no number from 0 up, or above 0 without a device.

    Example:
        >>> prefixes = tensord.PrefixCache(cache, ns)
        >>> tokens = np.arange(1000, dtype=np.uint32)
        >>> prefixes.put(tokens, [tensord.NormalLayer(np.zeros((1, 2, 1000, 8)))], wait=True).state
        'stored'
        >>> with prefixes.match(np.append(tokens, [5, 6])) as match:
        ...     match.offset, match.joined(0).shape
        (1000, (1, 2, 1000, 8))
    """

    def __init__(
        self,
        client: Client,
        namespace: Namespace,
        *,
        block_tokens: int = BLOCK_TOKENS,
        n_on_device: int = 0,
        device: DeviceCache | None = None,
        enabled: bool = True,
    ) -> None:
        if type(block_tokens) is not int or block_tokens not in _BLOCK_SIZES:
            raise BadPrefix(
                f"block_tokens is {block_tokens!r}; it is a power of two from {BLOCK_TOKENS_MIN} to {BLOCK_TOKENS_MAX}"
            )
        self.enabled = enabled
        self._client = client
        self._namespace = namespace
        self._block_tokens = block_tokens
        self._asker = Asker(client, namespace, block_tokens)
        n_on_device = check_count("n_on_device", n_on_device, _SEQUENCES_MAX)
        if n_on_device and device is None:
            raise UsageError(f"n_on_device is {n_on_device}, and there is no device: give a DeviceCache")
        self._on_device = DeviceSequences(device, namespace, block_tokens, n_on_device) if device is not None else None
        card = device.device if device is not None else None
        self._paged = PagedSnapshots(client, namespace, max(n_on_device, 1) * PER_SEQUENCE, card)

    @property
    def namespace(self) -> Namespace:
        """The namespace of the blocks."""
        return self._namespace

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self._block_tokens

    # ---- sequences

    def put(
        self,
        tokens: GivenTokens,
        layers: Sequence[PrefixLayer],
        *,
        media: GivenMedia = (),
        snapshots: Snapshots | None = None,
        agent: str = "",
        cost_ms: float = 0.0,
        ttl_s: float | None = None,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> PrefixPut:
        """Stores a sequence. Returns once it is copied out of the layers' arrays, which may then be changed.

        Only blocks that are not there are copied: those of its beginning that another sequence has are shared. A
        sequence whose arrays lie on `device` is not copied but kept: they must not be written any more.

        Args:
            tokens: n whole numbers from 0 to 2**32 - 1: an array, a tensor, bytes (4 for each), best uint32; a list is
                converted.
            layers: all of the model's, each with n tokens.
            media: which tokens stand for which image, audio or video. The last may end past the sequence's end.
            snapshots: by position before the end, a state for each layer that can be continued only from one.
            agent: on whose behalf.
            cost_ms: milliseconds that computing took, of those tokens that were not cached.
            ttl_s: seconds until what is stored now expires, unless others follow it; without it the daemon's default.
            wait: return only when it is known what became of it. A block that was evicted while those after it were on
                their way is then put again, up to three times; without `wait` only as long as blocks are being copied.
            timeout_s: how long room for it, and with `wait` the daemon, may take.

        Returns:
            What became of it. A refusal or an absent daemon is a state of it, and raises nothing.

        Raises:
            BadPrefix: tokens, media, layers or snapshots are none, or do not fit together; nothing is stored.
            LimitReached: more tokens than prefix_tokens_max, or more than 1024 blocks; nothing is stored.
            UnsupportedLeaf: an array that no payload can hold; nothing is stored.
            UsageError: a value is out of its range.
            TimedOut: with `wait`, the daemon did not answer in time; the put goes on.
        """
        if not self.enabled:
            return PrefixPut().settle("refused", Refusal(_OFF))
        deadline = self._deadline(timeout_s)
        sequence = self._sequence(tokens, layers, media, snapshots or {}, agent, cost_ms, ttl_s)
        put = self._kept(sequence, deadline, wait=wait)
        return put.wait(max(0.0, deadline - time.monotonic())) if wait else put

    def match(
        self, tokens: GivenTokens, *, media: GivenMedia = (), agent: str = "", timeout_s: float | None = None
    ) -> PrefixMatch | None:
        """The longest cached prefix of a sequence, pinned; None where nothing of it is cached.

        At least one token remains, so that there is something to go on from. A picture that differs ends the match
        where it begins. It counts as a use of all its blocks.

        Args:
            tokens, media, agent: as for `put`; no item ends past the end.
            timeout_s: how long the daemon may take; without it the client's timeout.

        Returns:
            None, too, where there is no daemon, or it did not answer in time.

        Raises:
            BadPrefix: tokens or media are none, or do not fit together.
            LimitReached: more tokens than prefix_tokens_max.
            UsageError: `agent` or `timeout_s` is out of its range.
        """
        if not self.enabled:
            return None
        deadline = self._deadline(timeout_s)
        query = tokens_of(tokens)
        self._check_tokens(len(query))
        items = media_of(media, len(query), may_be_cut=False)
        check_name("agent", agent, AGENT_NAME_CHARS_MAX, least=0)
        if len(query) < 2:
            return None
        on_device = self._on_device.match(query, items) if self._on_device is not None else None
        if on_device is not None and on_device[0] == uncut(len(query) - 1, items):
            # The host tier cannot have more.
            host = None
        else:
            host = self._host_match(query, items, agent, deadline)
        if on_device is None or (host is not None and host.offset > on_device[0]):
            return host
        offset, held = on_device
        return PrefixMatch(offset, query[offset:], kept(offset, items), held)

    def turn_ended(self, agent: str, *, tool_call: bool = False) -> None:
        """An agent's turn has ended: with `tool_call` in a call of a tool, whose result it goes on with; else somebody
        has to speak first. Waits for nothing; without a daemon nothing happens.

        Raises:
            UsageError: `agent` can be no agent's name.
        """
        self._say(agent, "tool_call" if tool_call else "turn_ended")

    def finished(self, agent: str) -> None:
        """An agent uses none of its sequences again. Waits for nothing; without a daemon nothing happens.

        Raises:
            UsageError: `agent` can be no agent's name.
        """
        self._say(agent, "finished")

    # ---- making room

    def evict_caches(self) -> int:
        """Waits until the sequences on the device above `n_on_device` have been offloaded to the host, the oldest
        first, as each put has them be in the background. What a match holds, and what the host does not take, stays.

        Returns:
            How many have been offloaded for that since the last call.
        """
        return self._on_device.evict(self._client.timeout_s) if self._on_device is not None else 0

    def evict_all(self) -> int:
        """Evicts all sequences of the namespace, of all its generations, whoever stored them; those that this object
        has on the device, and what it stored by `put_snapshot`. Leases stay right.

        Returns:
            How many sequences on the device, blocks and snapshots there were.

        Raises:
            DaemonUnavailable, TimedOut: nobody answered.
        """
        on_device = self._on_device.evict_all() if self._on_device is not None else 0
        link = self._client.link
        link.start()
        timeout_s = self._client.timeout_s
        asked = requests.ask_evict_prefixes(link, self._namespace.tag, timeout_s)
        count: int = link.answer(asked, timeout_s).count
        return on_device + self._paged.clear() + count

    # ---- engines that page their cache

    def put_snapshot(
        self,
        chain: Sequence[bytes],
        state: Any,
        *,
        agent: str = "",
        cost_ms: float = 0.0,
        ttl_s: float | None = None,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> Put:
        """Stores a recurrent state under the whole list of hashes of the blocks that it stands after. Of those that
        this object stored, max(n_on_device, 1) · 8 are kept: the one that was used longest ago goes for another.

        Args:
            chain: the engine's own hashes of all blocks before the position, 1 to 1,024 of them.
            state: a payload as `Client.put` takes it, or one on the device, which is copied before this returns.

        Raises:
            BadPrefix: `chain` is no such list; the item is named.
            UnsupportedLeaf, UsageError, TimedOut: as for `Client.put`.
        """
        if not self.enabled:
            put = Put(self._paged.key(chain))
            put.settle("refused", Refusal(_OFF))
            return put
        return self._paged.put(chain, state, agent=agent, cost_ms=cost_ms, ttl_s=ttl_s, wait=wait, timeout_s=timeout_s)

    def snapshot(self, chain: Sequence[bytes]) -> Lease | None:
        """A lease on the state that stands after exactly this chain of blocks, whoever stored it; None if there is
        none.

        Raises:
            BadPrefix: `chain` is no such list; the item is named.
        """
        return self._paged.get(chain) if self.enabled else None

    # ---- inside

    def _sequence(
        self,
        tokens: GivenTokens,
        layers: Sequence[PrefixLayer],
        media: GivenMedia,
        snapshots: Snapshots,
        agent: str,
        cost_ms: float,
        ttl_s: float | None,
    ) -> PrefixSequence:
        """A sequence to be stored, checked."""
        options = PutOptions(ttl_s=ttl_s, cost_ms=cost_ms, agent=agent).checked()
        given = tokens_of(tokens)
        count = len(given)
        self._check_tokens(count)
        if count > BLOCKS_MAX * self._block_tokens:
            enough = next((size for size in _BLOCK_SIZES if count <= BLOCKS_MAX * size), None)
            raise LimitReached(
                f"{count} tokens are more than {BLOCKS_MAX} blocks of {self._block_tokens}; "
                + (f"use block_tokens={enough}" if enough else f"store {BLOCKS_MAX * BLOCK_TOKENS_MAX} at most")
            )
        items = media_of(media, count, may_be_cut=True)
        checked = layers_of(layers, count, snapshots, self._block_tokens)
        return PrefixSequence(given, items, checked, options.agent, options.cost_ms, options.ttl_s)

    def _check_tokens(self, count: int) -> None:
        most = self._client.link.limits.prefix_tokens_max
        if count > most:
            raise LimitReached(f"{count} tokens are more than prefix_tokens_max of {most}; raise it at the daemon")

    def _kept(self, sequence: PrefixSequence, deadline: float, *, wait: bool) -> PrefixPut:
        """Where a sequence goes that was put."""
        if self._on_device is not None and self._on_device.holds(sequence.layers):
            return self._on_device.put(sequence)
        return self.store(sequence, deadline, wait=wait)

    def store(self, sequence: PrefixSequence, deadline: float | None = None, *, wait: bool = False) -> PrefixPut:
        """Puts a sequence, with its arrays in host memory, into the host tier. For the library."""
        deadline = self._deadline(None) if deadline is None else deadline
        self._client.link.start()
        chain = sequence.chain(self._namespace, self._block_tokens)
        return store(self._client, sequence, chain, deadline, wait=wait)

    def _host_match(self, query: Tokens, media: tuple[Media, ...], agent: str, deadline: float) -> PrefixMatch | None:
        """What the host tier has of a sequence."""
        for _ in range(_ASKED):
            matched = self._asker.ask(query, media, agent, deadline)
            if matched is None or not matched.blocks or not 0 < matched.offset < len(query):
                return None
            match = self._pinned(matched, query, media)
            if match is not None:
                return match
            # It went between the daemon's answer and the pin. The daemon has another answer now, if there is more.
        return None

    def _pinned(self, matched: messages.Matched, query: Tokens, media: tuple[Media, ...]) -> PrefixMatch | None:
        """What the daemon has found, as far as it is still there; None if none of it can be continued."""
        view = self._client.link.view
        if view is None:
            return None
        keys = matched.blocks if matched.snapshot is None else [*matched.blocks, matched.snapshot]
        batch = view.hold_many(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES))
        blocks, offset = len(matched.blocks), matched.offset
        snapshot_at = None if matched.snapshot is None else blocks
        if not batch.found.all():
            there = blocks if batch.found[:blocks].all() else int(np.argmin(batch.found))
            if not there:
                return None
            try:
                end, last = HeldBlocks(batch, keys, there, 0, None).end_of(there)
            except Corrupt:
                return None
            offset = uncut(min(offset, end), media)
            if last.exact or not offset:
                return None
            blocks, snapshot_at = -(-offset // last.block_tokens), None
        held = HeldBlocks(batch, keys, blocks, offset, snapshot_at)
        return PrefixMatch(offset, query[offset:], kept(offset, media), held)

    def _say(self, agent: str, state: Literal["tool_call", "turn_ended", "finished"]) -> None:
        check_name("agent", agent, AGENT_NAME_CHARS_MAX)
        requests.send_agent_turn(self._client.link, agent, state)

    def _deadline(self, timeout_s: float | None) -> float:
        limit_s = check_timeout(timeout_s, self._client.timeout_s)
        return time.monotonic() + limit_s
