"""Faults of an index in shared memory, seen from outside while its daemon is idle."""

from __future__ import annotations

from itertools import pairwise

from tensord.shm.index.index import IndexWriter
from tensord.shm.ring.layout import PAGE_BYTES, Superblock, span_bytes

from ..daemon_process import SHM_FOLDER


def fault_of_index(instance: str, holding: set[bytes]) -> str:
    """ "" if slots and lines agree, spans do not overlap, and only keys in `holding` wait for their pins."""
    memory = bytearray((SHM_FOLDER / f"tensord.{instance}.index").read_bytes())
    superblock = Superblock.unpack(bytes(memory[:PAGE_BYTES]))
    before = bytes(memory)
    index = IndexWriter(memory, superblock.geometry)
    if memory != before:
        return "a line disagrees with its slots"
    # A slot without a tree is that of a grant, which has entries within.
    slots = sorted((slot for slot in index.slots() if slot.tree_bytes), key=lambda slot: slot.offset)
    leaked = [slot for slot in slots if not slot.published and slot.key not in holding]
    if leaked:
        return f"unpublished slots without a holder: {leaked}"
    for one, other in pairwise(slots):
        if one.offset + span_bytes(one.payload_bytes) > other.offset:
            return f"spans that overlap: {one}, {other}"
    try:
        index.check_invariants()
    except AssertionError as error:
        return f"an index that is not sound: {error}"
    return ""
