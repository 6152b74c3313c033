"""Measures the taking over of a store: the time until it serves, the longest step, and the memory that an entry takes.

    python benchmarks/recovery_cost.py [--entries N] [--blocks LENGTH] [--ttl] [--policy NAME]

Owns: the command, and memory as an earlier daemon would have left it (headers without payloads). Does not own: the
start of a process, and the mapping of its memory.
"""

from __future__ import annotations

import argparse
import mmap
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tensord.daemon.recovery.former_headers import HEADER
from tensord.daemon.recovery.recovery import Recovery
from tensord.daemon.store.entries import Entries, StoreMemory
from tensord.shm.index.index import IndexWriter
from tensord.shm.ring.layout import SPAN_COUNTER_BITS, IndexGeometry, expiry_word

CLOCK = time.thread_time if "--cpu" in sys.argv else time.perf_counter
PAYLOAD_BYTES = 2880
SPAN_BYTES = 3072
MAGIC = 0x4E415053


def left_behind(entries: int, length: int, *, ttl: bool) -> StoreMemory:
    """The memory of a store with so many entries, in sequences of `length` blocks."""
    geometry = IndexGeometry.for_entries(entries)
    index, ring = mmap.mmap(-1, geometry.index_bytes), mmap.mmap(-1, entries * SPAN_BYTES)
    writer = IndexWriter.create(geometry, index)
    random = np.random.default_rng(1)
    row_bits = (2 * geometry.slot_count).bit_length() - 1
    places, rows = random.permutation(entries), random.permutation(entries) + 1
    lines = np.frombuffer(ring, "V64")
    words = np.frombuffer(index, "u8")
    head = np.zeros(entries, HEADER)
    buckets = np.arange(entries) % geometry.bucket_count
    keys = random.integers(0, 1 << 63, (entries, 4)).astype(np.uint64)
    keys[:, 0] = 7
    keys[:, 1] = keys[:, 1] >> np.uint64(32) << np.uint64(32) | buckets.astype(np.uint64)
    head["magic"], head["tree"], head["payload"], head["checksum"] = MAGIC, 64, PAYLOAD_BYTES, 1
    head["span"] = np.uint64((1 << SPAN_COUNTER_BITS) + (1 << row_bits)) + rows.astype(np.uint64)
    head["key"] = keys.view("V32")[:, 0]
    head["created"] = 1000 + random.permutation(entries) / 1000
    head["expires"], head["uid"], head["tokens"], head["cost"] = expiry_word(0.0), 1000, 100, 20.0
    if ttl:
        head["ttl"], head["expires"] = 1e5, expiry_word(1e6)
    if length > 1:
        has = np.arange(entries) % length > 0
        head["parent"][has] = head["key"][np.flatnonzero(has) - 1]
        head["has_parent"] = has
    packed = head.view("u1").reshape(entries, 192)
    for part in range(3):
        lines[places * (SPAN_BYTES // 64) + part] = packed[:, 64 * part : 64 * part + 64].copy().view("V64").reshape(-1)
    at = geometry.buckets_at // 8 + buckets * 72 + (np.arange(entries) // geometry.bucket_count + 1) * 8
    words[at] = 2
    for word in range(4):
        words[at + 1 + word] = keys[:, word]
    words[at + 5] = head["span"]
    words[at + 6] = np.uint64(64 << 48) | (places * SPAN_BYTES).astype(np.uint64)
    words[at + 7] = PAYLOAD_BYTES
    return StoreMemory(writer, memoryview(index), geometry, memoryview(ring), len(ring))


def own_bytes() -> int:
    """Anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--ttl", action="store_true")
    parser.add_argument("--policy", default="hazard")
    parser.add_argument("--steps", action="store_true", help="show where the longest steps are")
    parser.add_argument("--cpu", action="store_true", help="processor time of the thread instead of time passed")
    asked = parser.parse_args()
    memory = left_behind(asked.entries, asked.blocks, ttl=asked.ttl)
    before_bytes = own_bytes()
    start = CLOCK()
    entries = Entries(memory, asked.policy, 2, 1)
    recovery = Recovery(entries, time.monotonic() + 1e4, (), lambda key: False)
    made = CLOCK()
    times = []
    last = made
    for _ in recovery.steps():
        now = CLOCK()
        times.append(now - last)
        last = now
    serves = CLOCK()
    assert not recovery.corrupt and len(recovery.rows) == asked.entries, recovery.corrupt
    assert (entries.families.linked > 0) == (asked.blocks > 1)
    each = (own_bytes() - before_bytes) / asked.entries
    print(f"{asked.entries} entries: parts made after {made - start:.3f} s, serves after {serves - start:.3f} s")
    print(f"{len(times)} steps, the longest {1e3 * max(times):.1f} ms; {each:.0f} bytes of memory an entry")
    if asked.steps:
        for at in np.argsort(times)[::-1][:12].tolist():
            print(f"  step {at}: {1e3 * times[at]:.1f} ms")


if __name__ == "__main__":
    main()
