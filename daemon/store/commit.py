"""Commits: the records of one client become entries, in one flat function.

    record → its bytes are the grant's → key new? generation? parent? limits? → row, header, slot → published

What a put costs stands here and nowhere else. No object is made, nothing is sent and nothing is scheduled for a put:
what follows from puts (answers, refusals, blocks of sequences, writes to other stores) is left in lists, which the
caller empties once a batch.

Owns: the order of the checks, and the publication of an entry. Does not own: room (`runway`), grants, claims, policies.

Invariants: an entry is published after its bytes and its header are in the ring. A refused record changes nothing but
the bytes that it names, which are free. A batch is carried out up to the record that is none of the client's.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, Final

from ...errors import BadMessage
from ...shm.index.index import KEY_HASHES, SPAN
from ...shm.lanes.records import NO_KEY, RECORD, first_number
from ...shm.ring.layout import (
    BUCKET_SLOTS,
    SPAN_HEADER,
    SPAN_HEADER_BYTES,
    SPAN_MAGIC,
    SPAN_TAIL,
    TREE_BYTES_MAX,
    expiry_word,
)
from .entries import Entries, OverEntries
from .grants import LentGrant
from .slots import BODY, BUCKET_WORDS, CELL_WORDS, COUNT, LOWEST
from .table import EDGE, ENDED, LIVE

# Reasons of a refusal.
NOT_LENT: Final = 1
"""The record names bytes that are not its client's grant, or too many pieces of it."""
BAD_TREE: Final = 2
PAST: Final = 3
NO_PARENT: Final = 4
BAD_PARENT: Final = 5
NO_SLOT: Final = 6
TOO_MANY_TOKENS: Final = 7
BAD_BLOCK: Final = 8
NOT_WORTH_IT: Final = 9
"""The policy prefers the entries that would be evicted."""

NO_TOKENS_MAX: Final = 1 << 62
UNSUMMED_MAX: Final = 1 << 16
TAILS_MAX: Final = 64

_NEVER: Final = expiry_word(0.0)
_TAIL_AT: Final = SPAN_HEADER.size


@dataclass(slots=True)
class Submitter:
    """One client's side of its queue. `owner`: the number of its uid. `expected`: the number of its next record; 0: not
    known yet, since its lane may have been another connection's. `in_place`: it writes into the ring itself, and not
    into an inbox at the same offsets."""

    client: int
    owner: int
    grants: dict[int, LentGrant] = field(default_factory=dict)
    expected: int = 1
    in_place: bool = False


class Commits(OverEntries):
    """Commits into one ring. `claims`: the keys that somebody waits for. `is_past`: whether a key's generation is past;
    asked for namespaces in `tenants.invalidated`. `block`: takes the record of a block of a sequence into the index, if
    it continues its parent: (row, key, row of the parent, offset of the record in the ring, bytes, end of the payload)
    → whether it did."""

    def __init__(
        self,
        entries: Entries,
        claims: Container[bytes],
        is_past: Callable[[bytes], bool],
        block: Callable[[int, bytes, int, int, int, int], bool],
    ) -> None:
        super().__init__(entries)
        self._agents = entries.agents
        self._claims = claims
        self._is_past = is_past
        self._block = block
        self.tokens_max, self.default_ttl_s = NO_TOKENS_MAX, 0.0
        """The limits of one put. Those on bytes are counted when bytes are lent; entries over a limit of the whole
        store are evicted soon (`Runway`)."""
        self.evicts = False
        """Whether other entries go for what is put. Kept by `Runway`."""
        self.refused: list[tuple[int, int, int, bytes, int, int]] = []
        """(client, number, reason, key, claim, tokens) since the caller emptied it; so are the others."""
        self.unsummed: deque[int] = deque(maxlen=UNSUMMED_MAX)
        """Slots of entries whose clients have left the checksum to the daemon."""
        self.tails: deque[int] = deque(maxlen=TAILS_MAX)
        """Of the entries stored last: the span id of a block of a sequence, whose child may be under way; else 0."""
        self.fresh: list[int] = []
        """Rows that were stored."""
        self.existed: list[tuple[int, int, int]] = []
        """(client, number, row)."""
        self.awaited: list[bytes] = []
        """Keys that were stored or existed, and that somebody waits for."""

    def take(self, submitter: Submitter, records: memoryview, now: float) -> int:
        """Carries out a batch of records. Returns the number of the last one. Raises BadMessage if a record has not
        the number after the one before; those before it are carried out."""
        table, slots = self._table, self._slots
        states, offsets, sizes, payloads = table.states, table.offsets, table.sizes, table.payloads
        span_ids, tokens_of, costs, slot_of, ends = table.span_ids, table.tokens, table.costs, table.slots, table.ends
        digests, names, owners, agents = table.digests, table.namespaces, table.owners, table.agents
        fresh, tail, numbers = self.fresh.append, self.tails.append, self._agents.numbers
        by_key, renew, grants, lend = table.by_key, table.renew, submitter.grants, self._grants
        hidden = self._spans.hidden
        memory, words, free, mask, first_word = slots.memory, slots.words, slots.free, slots.mask, slots.first_word
        ring, claims, owner, client = self._ring, self._claims, submitter.owner, submitter.client
        tenants = self._tenants
        uid = tenants.uids[owner]
        tags, invalidated = tenants.number_of, tenants.invalidated
        ns_entries, ns_bytes = tenants.entries, tenants.bytes
        append, default_ttl_s = self._policy.was_put, self.default_ttl_s
        pack_header, pack_body = SPAN_HEADER.pack_into, BODY.pack_into
        crc, pack_tail, hashes = zlib.crc32, SPAN_TAIL.pack_into, KEY_HASHES.unpack
        tokens_max = self.tokens_max
        expected = submitter.expected or first_number(records)
        stored = stored_tokens = used = used_bytes = 0
        try:
            for record in RECORD.iter_unpack(records):
                (
                    number, key, offset, payload, checksum, claim, parent, cost, ttl, grant, tree, tokens, prefix,
                    agent, _,
                ) = record  # fmt: skip
                if number != expected:
                    raise BadMessage(f"record {number} follows record {expected - 1}: the queue is damaged")
                expected += 1
                size = (payload + SPAN_HEADER_BYTES + 63) & -64

                # The bytes are the client's.
                lent = grants.get(grant)
                if lent is None or not payload:
                    self.refused.append((client, number, NOT_LENT, key, claim, tokens))
                    continue
                row = lent.pieces[0]
                if len(lent.pieces) == 1 and offsets[row] == offset and sizes[row] == size:
                    # The grant is used up: its row becomes the entry's.
                    renew(row)
                    used_bytes += size
                    used += 1
                    del grants[grant]
                    # Slots.release, inline. Nobody reads a grant, so its slot has no uses.
                    slot = lent.slot
                    words[first_word + (slot // BUCKET_SLOTS + slot + 1) * CELL_WORDS + SPAN] = 0
                    free[slot // BUCKET_SLOTS] |= 1 << slot % BUCKET_SLOTS
                else:
                    row = lend.carve(lent, offset, size)
                    if not row:
                        self.refused.append((client, number, NOT_LENT, key, claim, tokens))
                        continue
                    owners[row] = owner
                    if not lent.pieces:
                        del grants[grant]

                # What refuses it.
                if key in by_key:
                    self.existed.append((client, number, by_key[key]))
                    if key in claims:
                        self.awaited.append(key)
                    self._give_up(row)
                    continue
                tag = key[:8]
                first, second, _ = hashes(key)
                first &= mask
                second &= mask
                if first == second:
                    second ^= 1 & mask
                bucket = first if COUNT[free[first]] >= COUNT[free[second]] else second
                bits = free[bucket]
                reason = 0
                if not tree or tree > payload or tree > TREE_BYTES_MAX:
                    reason = BAD_TREE
                elif tag in invalidated and self._is_past(key):
                    reason = PAST
                elif tokens > tokens_max:
                    reason = TOO_MANY_TOKENS
                elif not bits:
                    reason = NO_SLOT
                elif parent != NO_KEY or prefix:
                    reason = self._continues(row, record, now)
                if reason:
                    self.refused.append((client, number, reason, key, claim, tokens))
                    self._give_up(row)
                    continue
                if key in hidden:
                    self._spans.replaced(key)

                # The header, from which the next daemon knows the entry.
                span_id = span_ids[row]
                ttl = ttl or default_ttl_s
                pack_header(
                    ring, offset, SPAN_MAGIC, tree, span_id, key, payload, tokens, ttl, now, uid, prefix, cost, 0,
                    parent, parent != NO_KEY,
                )  # fmt: skip
                end = offset + _TAIL_AT
                pack_tail(ring, end, crc(ring[offset:end]), checksum, expiry_word(now + ttl) if ttl else _NEVER)

                # The slot, by which readers find it. Slots.take and Slots.publish, inline.
                cell = LOWEST[bits]
                free[bucket] = bits & (bits - 1)
                line = first_word + bucket * BUCKET_WORDS
                at: int = line + (cell + 1) * CELL_WORDS
                pack_body(memory, (at + 1) * 8, key, tree << 48 | offset, payload)
                # SYNC POINT: the span id after the rest of the slot, seq after the span id (shm/index/index.py).
                words[at + 5] = span_id
                words[at] = words[at] + 1
                words[line + cell] = words[at + 3]

                # The row.
                states[row] = LIVE
                by_key[key] = row
                slot_of[row] = bucket * 8 + cell
                payloads[row], tokens_of[row], costs[row] = payload, tokens, cost
                digests[row] = words[at + 3]
                ns = tags.get(tag)
                if ns is None:
                    ns = tenants.add(tag)
                names[row] = ns
                agents[row] = numbers[agent] if agent in numbers else self._agents.number(agent)
                ns_entries[ns] += 1
                ns_bytes[ns] += size
                if ttl:
                    ends[row] = now + ttl
                stored += 1
                stored_tokens += tokens
                append(row)
                fresh(row)
                tail(span_id if prefix or parent != NO_KEY else 0)
                if not checksum:
                    self.unsummed.append(bucket * 8 + cell)
                if key in claims:
                    self.awaited.append(key)
        finally:
            submitter.expected = expected
            lend.lent -= used
            lend.lent_bytes -= used_bytes
            self._policy.batch_ended(now)
            tenants.stored(owner, stored, stored_tokens)
        return expected - 1

    def _give_up(self, row: int) -> None:
        """Frees the bytes of a record that is not stored: no reader has ever known of them."""
        self._table.states[row] = ENDED
        self._tenants.owned_bytes[self._table.owners[row]] -= self._table.sizes[row]
        self._holes.free(row)

    def _continues(self, row: int, record: tuple[Any, ...], now: float) -> int:
        """Ties an entry to its parent. Returns the reason why that is refused; 0 if it is not."""
        _, key, offset, payload, _, _, parent, cost, _, _, tree, tokens, prefix, agent, _ = record
        table, above = self._table, EDGE
        if parent != NO_KEY:
            if parent[:8] != key[:8] or parent == key:
                return BAD_PARENT
            if key in self._spans.hidden:
                # It may be an ancestor of the parent, and must not come back with it.
                self._spans.replaced(key)
            above = table.by_key.get(parent) or self._spans.recall(parent)
            if not above:
                return NO_PARENT
            if self.evicts:
                policy, digest = self._policy, int.from_bytes(key[16:24], "little")
                policy.batch_ended(now)
                # The parent stays as if it had the child already.
                table.children[above] += 1
                agent = self._agents.numbers.get(agent, 0)
                is_worth_it = policy.admits(digest, table.sizes[row], above, cost, tokens, agent)
                table.children[above] -= 1
                if not is_worth_it:
                    return NOT_WORTH_IT
        if prefix:
            start = offset + SPAN_HEADER_BYTES
            record_at = start + ((tree + 63) & -64)
            if not self._block(row, key, above, record_at, prefix, start + payload):
                return BAD_BLOCK
            table.records[row] = prefix
        if above:
            self._families.link(row, above)
        return 0
