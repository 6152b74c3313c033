"""The prefix query: asks the daemon for the longest cached prefix of a sequence that lies in the inbox.

Owns: one query at a time, and its answer. Does not own: the inbox (writing/inbox.py), nor the use of the answer
(cache.py).
Invariants: a query is sent on the connection whose daemon knows its inbox, or not at all. The daemon reads it before
the next one is written, or answers a request that nobody waits for any more.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from ...errors import BadPrefix, TensordError
from ...ipc import messages
from ...shm.prefix import LAYOUT_BYTES, Media, PrefixRecord, Tokens, fold
from ..core import requests
from ..core.answers import PendingRequest
from ..core.link import Link
from ..core.once import answers
from ..writing.inbox import QUERY_BYTES
from .keys import scope_of

if TYPE_CHECKING:
    from ..core.cache import Client
    from ..core.namespace import Namespace

_NO_LAYOUT: Final = bytes(LAYOUT_BYTES)


class Asker:
    """Sends queries for one namespace at one generation. Thread-safe."""

    def __init__(self, client: Client, namespace: Namespace, block_tokens: int) -> None:
        self._client = client
        self._tag = namespace.tag
        self._scope = scope_of(namespace)
        self._block_tokens = block_tokens

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
        link.puts.wait_for_all_own()
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
        channel, inbox = link.puts.query_inbox(deadline)
        at, size_bytes = inbox.query_at, record.record_bytes
        record.pack_into(np.frombuffer(inbox.bytes[at : at + size_bytes], np.uint8), folded)
        left_s = max(0.0, deadline - time.monotonic())
        asked = requests.ask_match(link, channel, self._tag, at, size_bytes, agent, left_s)
        if not self._answers(link, asked, deadline):
            asked.cancel()
            return None
        answer: messages.Matched = link.answers.wait(asked, deadline - time.monotonic())
        return answer

    def _answers(self, link: Link, asked: PendingRequest, deadline: float) -> bool:
        """Whether the daemon answers at all. If not, the caller computes."""
        steps = answers(link, asked)
        while True:
            try:
                step = next(steps)
            except StopIteration as end:
                return bool(end.value)
            link.answers.within(step.future, min(step.within_s, deadline - time.monotonic()))
