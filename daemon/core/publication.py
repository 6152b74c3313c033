"""Turns a put whose payload is in the ring into an entry.

Owns the span's header, and the last checks: the namespace may have been invalidated, the key stored, or the parent
evicted while the payload was in flight. Does not own the put (`intake`), nor its answer (`put_answers`).

Invariant: a refused publication changes nothing.
"""

from __future__ import annotations

from ...errors import BadPrefix, TensordError
from ...shm.layout import SpanHeader
from ...shm.prefix import PrefixRecord
from .admission import parent_gone, too_far
from .entries import SpanEntry
from .expiry import Expiry, RemovalProgress
from .limits import StoreLimits
from .outbox import StoreOutbox
from .put_answers import PutAnswers
from .puts import PutProgress
from .span_table import SpanTable


class Publication:
    """Publishes one put after another."""

    def __init__(
        self, memory: SpanTable, expiry: Expiry, answers: PutAnswers, outbox: StoreOutbox, limits: StoreLimits
    ) -> None:
        self._memory = memory
        self._expiry = expiry
        self._answers = answers
        self._outbox = outbox
        self._limits = limits

    def change_limits(self, limits: StoreLimits) -> None:
        """Applies to later publications."""
        self._limits = limits

    def header(self, put: PutProgress) -> SpanHeader:
        """The header of the put's span, without its checksum. The time to live starts now."""
        entry, commit = put.entry, put.commit
        assert entry is not None
        # The header is made with the last part, so the time for other parts and the search for room does not count.
        entry.ttl_s = ttl_s = self._expiry.ttl_s(commit.ttl_s)
        entry.expires_at = None if ttl_s is None else self._outbox.now + ttl_s
        return SpanHeader(
            key=commit.key,
            span_id=entry.span_id,
            payload_bytes=commit.payload_bytes,
            tree_bytes=commit.tree_bytes,
            checksum=0,
            tokens=commit.tokens,
            created_s=entry.created_at,
            expires_s=entry.expires_at or 0.0,
            owner_uid=put.uid,
            prefix_bytes=commit.prefix_bytes,
            cost_ms=commit.cost_ms,
            ttl_s=ttl_s or 0.0,
            parent=commit.parent,
        )

    def publish(self, put: PutProgress, record: PrefixRecord | None, parent: SpanEntry | None, now: float) -> None:
        """Makes an entry of a put whose payload is in the ring, and answers it. If the key was stored meanwhile, the
        answer is "existed". `parent`: the published entry of the put's parent, if there is one.

        Raises:
            Invalidated: the key's namespace was invalidated meanwhile.
            BadPrefix, ParentGone, LimitReached: the block cannot be stored.
        """
        entry = put.entry
        assert entry is not None
        past = self._memory.index.generations.refusal(put.key)
        if past is not None:
            raise past
        stored = self._memory.entries.find(put.key)
        if stored is not None:
            self._answers.existed(put.client, put.commit, stored, now)
            return
        victim = self._memory.entries.hidden(put.key)
        if victim is not None:
            self._expiry.end(victim, RemovalProgress(victim.reason))
        self._show(put, entry, record, parent, now)
        put.entry, put.told = None, False
        self._expiry.published(entry, now)
        self._answers.stored(put, entry, now)

    def _show(
        self,
        put: PutProgress,
        entry: SpanEntry,
        record: PrefixRecord | None,
        parent: SpanEntry | None,
        now: float,
    ) -> None:
        """Publishes the copied span.

        Raises:
            BadPrefix, ParentGone, LimitReached: the block is refused. Nothing has changed then.
        """
        parent_key, is_block = put.commit.parent, put.commit.prefix_bytes > 0
        refusal: TensordError | None = None
        if is_block:
            if record is None or record.parent != parent_key:
                raise BadPrefix("the record names another parent than the Commit does")
            refusal = too_far(record.start + record.count, self._limits)
        if refusal is None and parent_key is not None and parent is None:
            refusal = parent_gone(parent_key)
        if refusal is not None:
            raise refusal
        self._memory.publish(entry, now, record, parent)
