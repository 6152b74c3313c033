"""The faults. Each text stands in one place of the source, whichever file that is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """`before` becomes `after`. `broken`: the promise that is not kept then. `tests`: those that run first."""

    tests: str
    broken: str
    before: str
    after: str


def _faults(*listed: str | tuple[str, str, str]) -> Iterator[Fault]:
    """The faults; a text says which tests run first for those behind it."""
    tests = ""
    for each in listed:
        if isinstance(each, str):
            tests = each
        else:
            yield Fault(tests, *each)


FAULTS = [
    *_faults(
        "tests/client/reading tests/shm",
        ("a slot that is being written is not read", "if found == key and not seq & 1:", "if found == key:"),
        (
            "a key of a past generation is a miss",
            "return generation_of(key) < self.current(",
            "return generation_of(key) > self.current(",
        ),
        ("a key has two buckets", "return bucket if bucket != first & mask else bucket ^ (1 & mask)", "return bucket"),
        (
            "an inbox cannot shrink under the daemon",
            "if seals & INBOX_SEALS != INBOX_SEALS:",
            "if not seals & INBOX_SEALS:",
        ),
        (
            "items of a prompt do not overlap",
            "if before is not None and before.end > item.start:",
            "if before is not None and before.end > item.end:",
        ),
        ("a header names each key of a dict once", "if len(set(keys)) != count:", "if len(set(keys)) > count:"),
        ("a header's check is looked at", "if check != zlib.crc32(span[: SPAN_HEADER.size]):", "if not check:"),
        (
            "an expiry word's check is looked at",
            "if word != high << _EXPIRY_CHECK_BITS | _expiry_check(high):",
            "if not word:",
        ),
        ("a tree has a limited depth", "if len(above) >= self._depth_max:", "if len(above) > 2 * self._depth_max:"),
        (
            "a payload beyond the mapped ring is a miss",
            "return (place & PLACE_OFFSET_MASK) + SPAN_HEADER_BYTES + payload_bytes <= len(self._ring)",
            "return True",
        ),
        (
            "get_many checks each slot after its pin",
            'unchanged = np.frombuffer(self.index.words, "u8")[at[hits]] == seq[hits]',
            'unchanged = np.frombuffer(self.index.words, "u8")[at[hits]] >= seq[hits]',
        ),
        (
            "a child ends no pin of its parent",
            'self.words = memoryview(bytearray(LANE_BYTES)).cast("Q")',
            "self.words",
        ),
        "tests/client/writing tests/integration/test_refusals.py",
        (
            "a put tells its outcome only once it has one",
            'if self.state != "sent":\n            return self\n        outcomes',
            'if self.state == "sent":\n            return self\n        outcomes',
        ),
        ("a refused put tells why", "self.error = error and without_frames(error)", "self.error = None"),
        ("the smallest place that is large enough is taken", "at = bisect_left(grants, (size_bytes,))", "at = 0"),
        (
            "a larger put's place is left to it",
            "return any(size_bytes < wanted <= left_bytes for",
            "return any(size_bytes < wanted < 0 for",
        ),
        ("a lookup waits for this client's own put", "OWN_WAIT_S: Final = 0.05", "OWN_WAIT_S: Final = 0.0"),
        "tests/daemon/core tests/daemon/recovery tests/daemon/reports tests/daemon/claims",
        ("only a lent place is written", "if lent is None or not payload:", "if not payload:"),
        (
            "a stored key is not stored again",
            "if key in by_key:\n                    self.existed",
            "if key in by_key and not payload:\n                    self.existed",
        ),
        (
            "a put of a past generation is refused",
            "elif tag in invalidated and self._is_past(key):",
            "elif tag in invalidated and not tree:",
        ),
        ("a put has at most max_tokens tokens", "elif tokens > tokens_max:", "elif tokens > 2 * tokens_max:"),
        (
            "a tree is not longer than its payload",
            "if not tree or tree > payload or tree > TREE_BYTES_MAX:",
            "if not tree:",
        ),
        (
            "a put that ends a claim wakes who waits",
            "                if key in claims:\n                    self.awaited.append(key)\n        finally:",
            "        finally:",
        ),
        (
            "an entry ends after its ttl",
            "if ttl:\n                    ends[row] = now + ttl",
            "if ttl:\n                    ends[row] = now + 60 * ttl",
        ),
        ("the default ttl holds", "ttl = ttl or default_ttl_s", "ttl = ttl or 0.0"),
        ("a parent is of the same namespace", "if parent[:8] != key[:8] or parent == key:", "if parent == key:"),
        (
            "a child without a parent is refused",
            "if not above:\n                return NO_PARENT",
            "if above is None:\n                return NO_PARENT",
        ),
        (
            "checksums left to the daemon are made",
            "if not checksum:\n                    self.unsummed.append",
            "if checksum:\n                    self.unsummed.append",
        ),
        "tests/daemon/store tests/daemon/replacement tests/daemon/core tests/daemon/reports",
        (
            "a pinned victim comes back",
            "for row in [row for row in gone if span_ids[row] in pinned]:",
            "for row in list[int]():",
        ),
        (
            "an entry in use does not go",
            "kept = [row for row in rows if table.firsts[row] or table.span_ids[row] in pinned]",
            "kept = [row for row in rows if table.firsts[row]]",
        ),
        (
            "a parent goes after its children",
            "== KNOWN) & (self._facts.children[rows] == 0)",
            "== KNOWN) & (self._facts.children[rows] >= 0)",
        ),
        (
            "what was just put stays",
            "return bool(self.put_at[row] > self._window_begins())",
            "return False",
        ),
        (
            "a sequence does not evict its own blocks",
            "return {self._table.row_of(span_id) for span_id in latest if span_id}",
            "return set()",
        ),
        (
            "max_entries holds",
            "return tenants.total_entries > budget.max_entries or (",
            "return tenants.total_entries > 2 * budget.max_entries or (",
        ),
        (
            "max_bytes holds",
            "if self.kept_bytes + size > budget.max_bytes:",
            "if self.kept_bytes + size > 2 * budget.max_bytes:",
        ),
        (
            "pinned_bytes_max holds",
            "if self.pinned_bytes + more > self.bytes_max:",
            "if self.pinned_bytes + more > 2 * self.bytes_max:",
        ),
        (
            "an object is not larger than object_bytes_max",
            "if size > span_bytes(limits.object_bytes_max):",
            "if size > 2 * span_bytes(limits.object_bytes_max):",
        ),
        ("a place is free only up to its end", "if high < move.size_bytes:", "if high < move.size_bytes // 2:"),
        "tests/daemon/recovery tests/daemon/test_superblock_damage.py tests/shm",
        ("an epoch is used once", "if last >= EPOCH_MAX:", "if last > EPOCH_MAX + 1:"),
        ("a damaged seq does no harm", "cells[huge, 0] &= np.uint64(1)", "cells[huge, 0] &= np.uint64((1 << 64) - 1)"),
        "tests/daemon/claims tests/client/computing tests/daemon/core/test_computing_once.py",
        (
            "only the holder of a claim renews it",
            "if claim is not None and claim.holder.client == client:",
            "if claim is not None:",
        ),
        (
            "a claim of another uid is not given up",
            "return [] if claim is None or claim.holder.uid != uid else self._failed(claim, now)",
            "return [] if claim is None else self._failed(claim, now)",
        ),
        ("a lost holder's claim goes to the next", "if claim.handed_over or not claim.waiters:", "if claim.waiters:"),
        (
            "one waits no longer than the holder takes",
            "max(0.0, claim.expected_at - now))",
            "max(0.0, now - claim.expected_at))",
        ),
        (
            "get_or_compute takes what is there",
            "if lease is not None:\n            client.tally.found += 1",
            "if lease is not None and not key:\n            client.tally.found += 1",
        ),
        "tests/daemon/prefix tests/shm/test_prefix.py tests/client/prefix",
        ("a prefix has the same media", "if mine != other:", "if mine is other:"),
        (
            "a query has at most prefix_tokens_max tokens",
            "if query.count > self._blocks.prefix_tokens_max:",
            "if query.count > 2 * self._blocks.prefix_tokens_max:",
        ),
        ("a block's text is compared", "return int(differs.argmax())", "return int(differs.argmin())"),
        (
            "a window that has rolled over is not rewound",
            'is_whole = kind == "normal" or (kind == "rotating" and tokens <= window)',
            'is_whole = kind in ("normal", "rotating")',
        ),
        "tests/daemon/governor tests/daemon/gauges tests/daemon/config",
        (
            "modes end below where they begin",
            "if not begins < _below(ends, self.hysteresis) <= ends <= 1:",
            "if not begins <= 1:",
        ),
        (
            "a gauge's reading is within its total",
            "if not (0 <= self.used_bytes <= SIZE_BYTES_MAX and 0 < self.total_bytes <= SIZE_BYTES_MAX):",
            "if not self.total_bytes:",
        ),
        (
            "a gauge's failure ends after several readings",
            "if source.logged and source.good >= RECOVERED_AFTER:",
            "if source.logged:",
        ),
        (
            "a reservation waits for its turn",
            "fits = not before and now >= self._grants_from and",
            "fits = now >= self._grants_from and",
        ),
        (
            "offered bytes lie inside the device's limits",
            "if limits.max_bytes is not None and message.size_bytes > limits.max_bytes:",
            "if limits.max_bytes is not None and message.size_bytes < 0:",
        ),
        "tests/daemon/remote tests/daemon/remote_stores",
        ("an object's expiry holds", "if expires and now_unix_s >= expires:", "if expires and now_unix_s < 0:"),
        (
            "the queue for the remote store is bounded",
            "if len(self.queue) >= QUEUED_MAX and key not in self.queue:",
            "if key in ():",
        ),
        (
            "a store that fails is left alone for a time",
            "return self.closed or now >= self.tries_at",
            "return True",
        ),
        "tests/daemon/config tests/daemon/test_session.py tests/client/checkpoints tests/client/device",
        (
            "write_in_place = group means the daemon's group",
            'return allowed == "group" and (self.peer.uid == os.geteuid() or self.peer.gid == os.getegid())',
            'return allowed == "group"',
        ),
        (
            "a setting is inside its range",
            "if too_low or (self.high is not None and not value <= self.high):",
            "if too_low:",
        ),
        ("a unit is known", "if match is None or match[2].upper() not in _BYTES:", "if match is None:"),
        (
            "weights that changed get another name",
            "return note.digest if (note.looks, note.form) == (looks, form) else None",
            "return note.digest if note.form == form else None",
        ),
        (
            "a device entry that was read while it was copied stays",
            "if entry.uses != uses or entry.leases or not self.remove(entry):",
            "if entry.leases or not self.remove(entry):",
        ),
    )
]
