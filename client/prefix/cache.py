"""The prefix cache: stores what a model's layers keep of token sequences, and finds the longest cached prefix.

Owns: the public calls, the query in the inbox, and which of the daemon's blocks a match has. Does not own: the search
among blocks (the daemon's index), the puts of blocks (put.py), nor the views of blocks (match.py).
Invariants: a match is exact to the token, its media are equal, and every layer can continue from its end. Without a
daemon, or without an answer in time, a match is a miss and a put is lost; neither raises for that. A query is sent on
the connection whose daemon knows its inbox, or not at all. The daemon reads it before the next one is written, or
answers a request that nobody waits for any more.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, Literal

import numpy as np

from ...errors import BadPrefix, DaemonUnavailable, LimitReached, TensordError, shown
from ...ipc.messages import control as messages
from ...ipc.messages.schema import AGENT_NAME_CHARS_MAX, BLOCKS_MAX
from ...shm.payloads.prefix import (
    BLOCK_TOKENS_MAX,
    BLOCK_TOKENS_MIN,
    LAYOUT_BYTES,
    Media,
    PrefixRecord,
    Tokens,
    fold,
    kept,
)
from ...shm.ring.layout import KEY_BYTES
from ..arguments.checks import check_name, check_timeout
from ..arguments.namespace import Namespace, check_namespace
from ..arguments.put_options import PutOptions
from ..computing.once import answers, at_once
from ..core.client import Client, check_client
from ..link.link import Link
from ..writing.memory import QUERY_BYTES
from ..writing.puts import ENDING
from .layers import GivenMedia, GivenTokens, PrefixLayer, Snapshots, layers_of, media_of, tokens_of
from .match import PrefixMatch
from .other_hosts import OtherHosts
from .put import PrefixPut, chain_of, scope_of, store

BLOCK_TOKENS: Final = 256
_BLOCK_SIZES: Final = [1 << shift for shift in range(BLOCK_TOKENS_MIN.bit_length() - 1, BLOCK_TOKENS_MAX.bit_length())]

_ASKED: Final = 2
"""Attempts at a match. Another one follows if blocks were evicted between the daemon's answer and the pin."""
_NO_LAYOUT: Final = bytes(LAYOUT_BYTES)


class PrefixCache:
    """Prefix KV cache shared by all processes on the host: layers of token sequences, to continue from. Thread-safe.

    Args:
        client: the client whose daemon keeps the blocks.
        namespace: what makes two models' layers differ.
        block_tokens: tokens of a block, a power of two from 16 to 4096. Sequences share whole blocks, and only with
            caches of the same number. A match finds sequences of every number.

    `namespace`, `block_tokens`: as given.

    Raises:
        BadPrefix: `block_tokens` is not such a number.
        UsageError: `client` is no Client; or in a call, a value is out of its range.

    Example:
        >>> prefixes = tensord.PrefixCache(cache, ns)
        >>> tokens = np.arange(1000, dtype=np.uint32)
        >>> prefixes.put(tokens, [tensord.NormalLayer(np.zeros((1, 2, 1000, 8)))], wait=True).state
        'stored'
        >>> with prefixes.match(np.append(tokens, [5, 6])) as match:
        ...     match.offset, match.joined(0).shape
        (1000, (1, 2, 1000, 8))
    """

    def __init__(self, client: Client, namespace: Namespace, *, block_tokens: int = BLOCK_TOKENS) -> None:
        if type(block_tokens) is not int or block_tokens not in _BLOCK_SIZES:
            raise BadPrefix(
                f"block_tokens is {shown(block_tokens)}; use a power of two from {BLOCK_TOKENS_MIN} to "
                f"{BLOCK_TOKENS_MAX}"
            )
        self._client = check_client(client)
        self.namespace = check_namespace(namespace)
        self.block_tokens = block_tokens
        self._other_hosts = OtherHosts(client, namespace, block_tokens)
        self._tag, self._scope = namespace.tag, scope_of(namespace)

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
        """Stores a sequence. Returns once the layers' arrays are copied; the caller may change them from then on.

        Only missing blocks are copied; blocks at the start that another sequence has are shared.

        Args:
            tokens: n whole numbers from 0 to 2**32 - 1, of shape (n,): an array, a tensor or bytes (4 for each token),
                best uint32. A list is converted.
            layers: all layers of the model, each with n tokens.
            media: which tokens stand for which image, audio or video. The last item may end after the sequence.
            snapshots: by position before the end, a state for each layer that can only be continued from a state.
            agent: the agent that the sequence belongs to.
            cost_ms: milliseconds that computing the uncached tokens took.
            ttl_s: seconds until the new blocks expire, unless they have child blocks. Default: the daemon's setting.
            wait: return only once the put is settled. If the daemon evicts a parent block meanwhile, the put is
                repeated from there, up to three times; without `wait` only while blocks are still being copied.
            timeout_s: seconds to wait for room and, with `wait`, for the daemon.

        Returns:
            The put and its state. A refusal or an absent daemon is a state, and raises nothing.

        Raises:
            BadPrefix: tokens, media, layers or snapshots are invalid, or do not fit together; nothing is stored.
            LimitReached: more tokens than prefix_tokens_max, or more than 1024 blocks; nothing is stored.
            UnsupportedLeaf: an array has a type that `Client.put` does not take; nothing is stored.
            TimedOut: with `wait`, the daemon did not answer in time; the put goes on.
        """
        if sys.is_finalizing():
            # numpy may be unable to describe arrays by now.
            return PrefixPut().settle("lost", DaemonUnavailable(ENDING))
        limit_s = check_timeout(timeout_s, self._client.timeout_s)
        deadline = time.monotonic() + limit_s
        options = PutOptions(ttl_s=ttl_s, cost_ms=cost_ms, agent=agent).checked()
        given = self._checked(tokens)
        count = len(given)
        if count > BLOCKS_MAX * self.block_tokens:
            enough = next((size for size in _BLOCK_SIZES if count <= BLOCKS_MAX * size), None)
            raise LimitReached(
                f"{count} tokens exceed {BLOCKS_MAX} blocks of {self.block_tokens}; "
                + (f"use block_tokens={enough}" if enough else f"store at most {BLOCKS_MAX * BLOCK_TOKENS_MAX} tokens")
            )
        items = media_of(media, count, may_be_cut=True)
        checked = layers_of(layers, count, snapshots or {}, self.block_tokens)
        self._other_hosts.learn(checked)
        self._client.link.start()
        folded = fold(given, items)
        chain = chain_of(self.namespace, checked.digest, checked.exact, folded, items, self.block_tokens)
        put = store(self._client, chain, checked, options, deadline, limit_s if wait else None)
        self._other_hosts.tell(checked, options.cost_ms / len(chain), deadline)
        return put.wait_until(deadline, limit_s) if wait else put

    def match(
        self, tokens: GivenTokens, *, media: GivenMedia = (), agent: str = "", timeout_s: float | None = None
    ) -> PrefixMatch | None:
        """Returns the longest cached prefix of a sequence, pinned, or None if nothing of it is cached.

        The match leaves at least one token to compute. If a media item differs, the match ends before its first token.
        Counts as a use of all matched blocks.

        Args:
            tokens, media, agent: as for `put`, but no item ends after the sequence.
            timeout_s: seconds to wait for the daemon. Default: the client's `timeout_s`.

        Returns:
            The match. None also without a daemon, or without an answer in time.

        Raises:
            BadPrefix: tokens or media are invalid, or do not fit together.
            LimitReached: more tokens than prefix_tokens_max.
        """
        deadline = time.monotonic() + check_timeout(timeout_s, self._client.timeout_s)
        query = self._checked(tokens)
        items = media_of(media, len(query), may_be_cut=False)
        check_name("agent", agent, AGENT_NAME_CHARS_MAX, least=0)
        if len(query) < 2:
            return None
        for _ in range(_ASKED):
            matched = self._ask(query, items, agent, deadline)
            if matched is not None and self._other_hosts.fetch(query, items, matched.offset, deadline):
                matched = self._ask(query, items, agent, deadline)
            if matched is None or not matched.blocks or not 0 < matched.offset < len(query):
                return None
            match = self._pinned(matched, query, items)
            if match is not None:
                return match
        return None

    def turn_ended(self, agent: str, *, tool_call: bool = False) -> None:
        """Reports the end of an agent's turn. Does not wait; without a daemon, does nothing.

        Args:
            tool_call: True if the turn ended in a tool call, after whose result the agent continues by itself. False if
                the agent waits for the next message.
        """
        self._say(agent, "tool_call" if tool_call else "turn_ended")

    def finished(self, agent: str) -> None:
        """Reports that an agent will not use its sequences again. Does not wait; without a daemon, does nothing."""
        self._say(agent, "finished")

    # ---- internal

    def _checked(self, tokens: GivenTokens) -> Tokens:
        given = tokens_of(tokens)
        most = self._client.link.limits.prefix_tokens_max
        if len(given) > most:
            raise LimitReached(f"{len(given)} tokens exceed prefix_tokens_max ({most}); raise it at the daemon")
        return given

    def _ask(self, query: Tokens, media: tuple[Media, ...], agent: str, deadline: float) -> messages.Matched | None:
        """The daemon's match for a sequence; None without an answer by `deadline` (monotonic seconds). Waits for the
        blocks that this client has just put. Raises BadPrefix if the daemon refuses the sequence as invalid."""
        link = self._client.link
        if not link.connected:
            link.start()
        if not link.connected:
            return None
        link.puts.wait_for_puts()
        record = PrefixRecord(self._scope, _NO_LAYOUT, False, False, 0, len(query), None, media, self.block_tokens)
        if record.record_bytes > QUERY_BYTES:
            return None
        lock = link.puts.query_lock
        try:
            # Within the try: a signal handler may raise right after the lock was taken.
            if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return None
            return self._asked(link, record, fold(query, media), agent, deadline)
        except BadPrefix:
            raise
        except TensordError:
            return None
        finally:
            with suppress(RuntimeError):  # it was not taken
                lock.release()

    def _asked(
        self, link: Link, record: PrefixRecord, folded: Tokens, agent: str, deadline: float
    ) -> messages.Matched | None:
        # The caller computes rather than wait for a daemon that does not answer.
        channel, inbox = link.puts.query_inbox(min(deadline, time.monotonic() + link.silence.patience_s))
        at, size_bytes = inbox.query_at, record.record_bytes
        record.pack_into(np.frombuffer(inbox.bytes[at : at + size_bytes], np.uint8), folded)
        left_s = max(0.0, deadline - time.monotonic())
        asked = link.ask(
            lambda number: messages.MatchPrefix(number, self._tag, at, size_bytes, agent), left_s, connected=channel
        )

        async def listen(future: Future[Any], within_s: float) -> None:
            link.answers.within(future, min(within_s, deadline - time.monotonic()))

        if not at_once(answers(link, asked, listen)):
            asked.cancel()
            return None
        answer: messages.Matched = link.answers.wait(asked, deadline - time.monotonic())
        return answer

    def _pinned(self, matched: messages.Matched, query: Tokens, media: tuple[Media, ...]) -> PrefixMatch | None:
        """Pins the blocks of the daemon's answer; None if one of them was evicted meanwhile."""
        view = self._client.link.view
        if view is None:
            return None
        keys = matched.blocks if matched.snapshot is None else [*matched.blocks, matched.snapshot]
        batch = view.hold_many(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES))
        if not batch.found.all():
            return None
        offset, snapshot_at = matched.offset, None if matched.snapshot is None else len(matched.blocks)
        return PrefixMatch(offset, query[offset:], kept(offset, media), batch, keys, len(matched.blocks), snapshot_at)

    def _say(self, agent: str, state: Literal["tool_call", "turn_ended", "finished"]) -> None:
        check_name("agent", agent, AGENT_NAME_CHARS_MAX)
        self._client.link.ask(lambda number: messages.AgentTurn(number, agent, state))
