"""The prefix query: asks the daemon for the longest cached prefix of a sequence that lies in the inbox.

Owns: the inbox regions that queries are written to, reused for later queries. Does not own: the use of the answer
(cache.py).
Invariants: a query is sent on the connection whose inbox holds it, or not at all.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from ...errors import BadPrefix, TensordError
from ...ipc import messages
from ...shm.prefix import LAYOUT_BYTES, Media, PrefixRecord, Tokens, fold
from ..core import nested, requests
from ..core.answers import PendingRequest
from ..core.aside import aside
from ..core.inbox import Region
from ..core.link import Link
from ..core.once import answers
from .keys import scope_of

if TYPE_CHECKING:
    from ..core.cache import Client
    from ..core.namespace import Namespace

_NO_LAYOUT: Final = bytes(LAYOUT_BYTES)
# Regions are a multiple of this size, so that a later query often fits into the same one.
_STEP_BYTES: Final = 64 << 10
_KEPT_BYTES_MAX: Final = 1 << 20
_KEPT_MAX: Final = 2


class Asker:
    """Sends queries for one namespace at one generation. Thread-safe."""

    def __init__(self, client: Client, namespace: Namespace, block_tokens: int) -> None:
        self._client = client
        self._tag = namespace.tag
        self._scope = scope_of(namespace)
        self._block_tokens = block_tokens
        self._kept: deque[Region] = deque()
        weakref.finalize(self, _abandon, self._kept)

    def ask(self, query: Tokens, media: tuple[Media, ...], agent: str, deadline: float) -> messages.Matched | None:
        """Returns the daemon's match for a sequence; None without an answer by `deadline` (monotonic seconds).

        Raises:
            BadPrefix: the daemon refuses the sequence as invalid.
        """
        link = self._client.link
        if nested.within(link.puts):
            return None
        if not link.connected:
            link.start()
        # On this connection only. After its end the region's inbox may be retired; then writes to it stay in this
        # process, and a daemon that maps the inbox again would read an old query.
        connected = link.connection
        if connected is None:
            return None
        record = PrefixRecord(self._scope, _NO_LAYOUT, False, False, 0, len(query), None, media, self._block_tokens)
        size_bytes = record.record_bytes
        try:
            region = aside(partial(self._region, size_bytes, deadline))
        except TensordError:
            return None
        try:
            assert region.memory is not None
            record.pack_into(region.memory[:size_bytes], fold(query, media))
            left_s = max(0.0, deadline - time.monotonic())
            asked = requests.ask_match(
                link, connected, self._tag, region.offset, size_bytes, agent, region.inbox.number, left_s
            )
            if not self._answers(link, asked, deadline):
                asked.cancel()
                return None
            answer: messages.Matched = link.answers.wait(asked, deadline - time.monotonic())
        except BadPrefix:
            raise
        except TensordError:
            return None
        finally:
            # Without an answer, the daemon may later read another query or a put in this region. That answer is
            # ignored.
            self._give_back(region)
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

    def _region(self, size_bytes: int, deadline: float) -> Region:
        puts = self._client.link.puts
        with suppress(IndexError):
            region = self._kept.pop()
            if not puts.inboxes.is_current(region):
                # It belongs to a former inbox, or to the process that this one was forked from.
                region.abandon_from_finalizer()
                _abandon(self._kept)
            elif region.memory is not None and len(region.memory) >= size_bytes:
                return region
            else:
                region.release()
        return puts.reserve(-(-size_bytes // _STEP_BYTES) * _STEP_BYTES, deadline)

    def _give_back(self, region: Region) -> None:
        memory = region.memory
        if memory is not None and len(memory) <= _KEPT_BYTES_MAX and len(self._kept) < _KEPT_MAX:
            self._kept.append(region)
        else:
            region.abandon_from_finalizer()


def _abandon(kept: deque[Region]) -> None:
    while kept:
        kept.pop().abandon_from_finalizer()
