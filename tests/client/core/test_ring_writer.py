"""The ring as a client writes it: the bytes, their checksum, and what the first write of a page costs."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import xxhash

from tensord.client.core.ring_writer import RingWriter
from tensord.shm.layout import PAGE_BYTES
from tensord.shm.payload import Payload
from tensord.shm.tree import encode

RING_BYTES = 16 << 20
OFFSET = 3 * PAGE_BYTES + 64


@pytest.fixture
def ring() -> Iterator[int]:
    fd = os.memfd_create("ring")
    # As the daemon leaves it: each page was written once.
    os.pwrite(fd, bytes(RING_BYTES), 0)
    yield fd
    os.close(fd)


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def test_a_payload_is_in_the_ring_with_its_checksum_and_nothing_beside_it_changes(ring: int) -> None:
    payload = encode(np.random.default_rng(1).integers(0, 256, (3 << 20) + 17, np.uint8))
    checksum = RingWriter(ring).write(payload, OFFSET)
    written = os.pread(ring, RING_BYTES, 0)
    end = OFFSET + payload.payload_bytes
    assert checksum == xxhash.xxh3_64(written[OFFSET:end]).intdigest().to_bytes(8, "little")
    expected = bytearray(payload.payload_bytes)
    payload.write_into(expected)
    assert expected == written[OFFSET:end]
    assert not any(written[:OFFSET]) and not any(written[end:])


@pytest.mark.parametrize("piece_bytes", [1000, 1 << 20, 16 << 20])
def test_a_payload_is_written_in_pieces_of_its_own_choice(
    ring: int, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    payload = encode(np.random.default_rng(1).integers(0, 256, (1 << 20) + 17, np.uint8))
    expected = RingWriter(ring).write(payload, OFFSET)
    ranges, write_range = [], Payload.write_range

    def noted(self: Payload, to: Any, start: int, stop: int) -> None:
        ranges.append((start, stop))
        write_range(self, to, start, stop)

    monkeypatch.setattr(Payload, "write_range", noted)
    monkeypatch.setattr(Payload, "piece_bytes", piece_bytes)
    assert RingWriter(ring).write(payload, OFFSET) == expected
    assert ranges == [
        (at, min(at + piece_bytes, payload.payload_bytes)) for at in range(0, payload.payload_bytes, piece_bytes)
    ]


def test_the_pages_of_a_payload_are_mapped_together(ring: int) -> None:
    """A kernel before 5.14 maps them one by one."""
    if tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14):
        pytest.skip("this kernel has no MADV_POPULATE_READ")
    payload, writer = encode(np.ones(8 << 20, np.uint8)), RingWriter(ring)
    before = faults()
    writer.write(payload, OFFSET)
    assert faults() - before < payload.payload_bytes // PAGE_BYTES // 4
