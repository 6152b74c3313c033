"""A match's question to the daemon, which reads the sequence where it stands in the inbox.

Owns: the region of the inbox that queries are written to, kept from one to the next. Does not own what an answer means.
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
from ...shm.prefix import LAYOUT_BYTES, Media, Piece, Tokens, fold
from ..core import requests
from ..core.aside import aside
from ..core.inbox import Region
from .keys import scope_of

if TYPE_CHECKING:
    from ..core.cache import Client
    from ..core.namespace import Namespace

_NO_LAYOUT: Final = bytes(LAYOUT_BYTES)
# Regions are so large or a multiple of it, so that the next query fits where this one did.
_STEP_BYTES: Final = 64 << 10
_KEPT_BYTES_MAX: Final = 1 << 20
_KEPT_MAX: Final = 2


class Asker:
    """Asks for sequences of one namespace at one generation. Safe to use from several threads."""

    def __init__(self, client: Client, namespace: Namespace, block_tokens: int) -> None:
        self._client = client
        self._tag = namespace.tag
        self._scope = scope_of(namespace)
        self._block_tokens = block_tokens
        self._kept: deque[Region] = deque()
        weakref.finalize(self, _abandon, self._kept)

    def ask(self, query: Tokens, media: tuple[Media, ...], agent: str, deadline: float) -> messages.Matched | None:
        """What the daemon has of a sequence; None without an answer by `deadline` (monotonic seconds).

        Raises:
            BadPrefix: the daemon takes it for no sequence.
        """
        link = self._client.link
        if not link.connected:
            link.start()
        # On this connection or not at all. When it ends, the region's inbox may be retired: what is written there then
        # stays here, and a daemon that is told of the inbox again would read the query before.
        connected = link.connection
        if connected is None:
            return None
        piece = Piece(self._scope, _NO_LAYOUT, False, False, 0, len(query), None, media, self._block_tokens)
        size_bytes = piece.record_bytes
        try:
            region = aside(partial(self._region, size_bytes, deadline))
        except TensordError:
            return None
        try:
            assert region.memory is not None
            piece.pack_into(region.memory[:size_bytes], fold(query, media))
            left_s = max(0.0, deadline - time.monotonic())
            asked = requests.ask_match(
                link, connected, self._tag, region.offset, size_bytes, agent, region.inbox.number, left_s
            )
            answer: messages.Matched = link.answer(asked, deadline - time.monotonic())
        except BadPrefix:
            raise
        except TensordError:
            return None
        finally:
            # Where there is no answer yet, the daemon may read another query here, or a put: nobody hears the answer.
            self._give_back(region)
        return answer

    def _region(self, size_bytes: int, deadline: float) -> Region:
        puts = self._client.link.puts
        with suppress(IndexError):
            region = self._kept.pop()
            if not puts.inboxes.is_current(region):
                # Of an inbox that is to be closed, or of the process that this one was forked off.
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
