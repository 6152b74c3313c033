"""The prefix query: asks the daemon for the longest cached prefix of a sequence that lies in the inbox, and pins it.

Owns: one query at a time, its answer, and which of the answer's blocks a match has. Does not own: the inbox
(writing/inbox.py), the blocks of other hosts (other_hosts.py), nor the views of blocks (match.py).
Invariants: a query is sent on the connection whose daemon knows its inbox, or not at all. The daemon reads it before
the next one is written, or answers a request that nobody waits for any more.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ...errors import BadPrefix, Corrupt, TensordError
from ...ipc.messages import control as messages
from ...shm.payloads.prefix import LAYOUT_BYTES, Media, PrefixRecord, Tokens, fold, kept, uncut
from ...shm.ring.layout import KEY_BYTES
from ..computing.once import answers, at_once
from ..link.link import Link
from ..writing.inbox import QUERY_BYTES
from .keys import scope_of
from .match import PrefixMatch

if TYPE_CHECKING:
    from ..arguments.namespace import Namespace
    from ..core.client import Client
    from .other_hosts import OtherHosts

# Attempts at a match. Another one follows if the blocks were evicted before this process pinned them.
_ASKED: Final = 2
_NO_LAYOUT: Final = bytes(LAYOUT_BYTES)


class Asker:
    """Finds matches in the host tier, for one namespace at one generation. Thread-safe."""

    def __init__(self, client: Client, namespace: Namespace, block_tokens: int, other_hosts: OtherHosts) -> None:
        self._client = client
        self._tag = namespace.tag
        self._scope = scope_of(namespace)
        self._block_tokens = block_tokens
        self._other_hosts = other_hosts

    def match(self, query: Tokens, media: tuple[Media, ...], agent: str, deadline: float) -> PrefixMatch | None:
        """Returns the longest match in the host tier, pinned; None without one, or without an answer by `deadline`
        (monotonic seconds).

        Raises:
            BadPrefix: the daemon refuses the sequence as invalid.
        """
        for _ in range(_ASKED):
            matched = self.ask(query, media, agent, deadline)
            if matched is not None and self._other_hosts.fetch(query, media, matched.offset, deadline):
                matched = self.ask(query, media, agent, deadline)
            if matched is None or not matched.blocks or not 0 < matched.offset < len(query):
                return None
            match = self._pinned(matched, query, media)
            if match is not None:
                return match
            # The blocks were evicted between the daemon's answer and the pin. Ask again for what is left.
        return None

    def ask(self, query: Tokens, media: tuple[Media, ...], agent: str, deadline: float) -> messages.Matched | None:
        """Returns the daemon's match for a sequence; None without an answer by `deadline` (monotonic seconds).

        Waits for the blocks that this client has just put.

        Raises:
            BadPrefix: the daemon refuses the sequence as invalid.
        """
        link = self._client.link
        if not link.connected:
            link.start()
        if not link.connected:
            return None
        link.puts.wait_for_puts()
        record = PrefixRecord(self._scope, _NO_LAYOUT, False, False, 0, len(query), None, media, self._block_tokens)
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
        """Pins the blocks of the daemon's answer, as far as they are still there. None if no layer could continue from
        them.
        """
        view = self._client.link.view
        if view is None:
            return None
        keys = matched.blocks if matched.snapshot is None else [*matched.blocks, matched.snapshot]
        batch = view.hold_many(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES))
        blocks, offset = len(matched.blocks), matched.offset
        snapshot_at = None if matched.snapshot is None else blocks
        if not batch.found.all():
            present = blocks if batch.found[:blocks].all() else int(np.argmin(batch.found))
            if not present:
                return None
            try:
                end, last = PrefixMatch(0, query, {}, batch, keys, present, None).last_block()
            except Corrupt:
                return None
            offset = uncut(min(offset, end), media)
            if last.exact or not offset:
                return None
            blocks, snapshot_at = -(-offset // last.block_tokens), None
        return PrefixMatch(offset, query[offset:], kept(offset, media), batch, keys, blocks, snapshot_at)
