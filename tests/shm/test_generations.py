"""Generations of namespaces in shared memory: what the daemon raised is what clients and later daemons read."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.errors import LayoutMismatch
from tensord.shm.index.generations import GenerationReader, GenerationWriter
from tensord.shm.index.keys import GENERATION_MAX, generation_of, make_key
from tensord.shm.ring.layout import IndexGeometry

CAPACITY = 6
GEOMETRY = IndexGeometry(1, CAPACITY)
# Tags that are found across the borders of others, and zeros, as unused memory has them.
TAGS = st.sampled_from([bytes(8), b"\1" + bytes(7), bytes(7) + b"\1", b"aaaabbbb", b"bbbbaaaa", b"\1\0\0\0\0\0\0\0"])


def empty() -> mmap.mmap:
    made = mmap.mmap(-1, GEOMETRY.index_bytes)
    GenerationWriter.create(made, GEOMETRY)
    return made


@pytest.fixture
def memory() -> mmap.mmap:
    return empty()


@given(st.lists(st.tuples(TAGS, st.integers(1, 1 << 20)), max_size=12))
def test_a_raised_generation_is_read_by_writer_readers_and_the_next_daemon(raised: list[tuple[bytes, int]]) -> None:
    memory = empty()
    writer, reader = GenerationWriter(memory, GEOMETRY), GenerationReader(memory, GEOMETRY)
    model: dict[bytes, int] = {}
    for tag, more in raised:
        model[tag] = model.get(tag, 0) + more
        writer.raise_to(tag, model[tag])
        for table in (writer, reader, GenerationWriter(memory, GEOMETRY)):
            for each in (*model, b"never so"):
                assert table.current(each) == model.get(each, 0)
        writer.check_invariants()
        assert len(writer) == len(model)


DAMAGES = {
    "more than there is room for": (0, (CAPACITY + 1).to_bytes(8, "little")),
    "far more": (0, b"\xff" * 8),
    "generation 0": (24, bytes(8)),
    "no generation": (24, (GENERATION_MAX + 1).to_bytes(8, "little")),
    "another generation": (24, (5).to_bytes(8, "little")),
    "a lower one": (24, bytes(7)),
    "a namespace twice": (40, b"aaaabbbb"),
    "no count": (0, bytes(8)),
    "no count and no entry": (0, bytes(48)),
    "bytes behind the table": (72, b"\x01"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_table_is_refused_and_not_guessed(memory: mmap.mmap, damage: str) -> None:
    at, bytes_ = DAMAGES[damage]
    writer = GenerationWriter(memory, GEOMETRY)
    writer.raise_to(b"aaaabbbb", 3)
    writer.raise_to(b"bbbbaaaa", 4)
    start = GEOMETRY.generations_at + at
    memory[start : start + len(bytes_)] = bytes_
    with pytest.raises(LayoutMismatch, match=r"generations of namespaces.*purge"):
        GenerationWriter(memory, GEOMETRY)


def test_an_entry_is_seen_whole_or_not_at_all(memory: mmap.mmap) -> None:
    writer, reader = GenerationWriter(memory, GEOMETRY), GenerationReader(memory, GEOMETRY)
    writer.raise_to(b"aaaabbbb", 3)
    # As a daemon leaves it that dies before the count.
    GenerationWriter.create(memory, GEOMETRY)
    assert reader.current(b"aaaabbbb") == 0
    # What was asked for is done: nobody was told that it is, nor that it is not.
    later = GenerationWriter(memory, GEOMETRY)
    assert len(later) == 1
    later.raise_to(b"bbbbaaaa", 1)
    assert (reader.current(b"bbbbaaaa"), reader.current(b"aaaabbbb")) == (1, 3)


def test_a_table_entry_counts_for_the_uid_that_invalidated_first(memory: mmap.mmap) -> None:
    writer, reader = GenerationWriter(memory, GEOMETRY), GenerationReader(memory, GEOMETRY)
    writer.raise_to(b"aaaabbbb", 1, 4_294_967_295)
    writer.raise_to(b"bbbbaaaa", 1, 1000)
    writer.raise_to(b"aaaabbbb", GENERATION_MAX, 1000)
    for table in (writer, GenerationWriter(memory, GEOMETRY)):
        assert table.of_uid == {4_294_967_295: 1, 1000: 1}
        assert (table.current(b"aaaabbbb"), table.current(b"bbbbaaaa")) == (GENERATION_MAX, 1)
        assert b"aaaabbbb" in table and b"never so" not in table
    assert (reader.current(b"aaaabbbb"), reader.current(b"bbbbaaaa")) == (GENERATION_MAX, 1)


@given(st.integers(0, GENERATION_MAX), st.integers(0, GENERATION_MAX))
def test_a_key_is_refused_exactly_if_its_generation_is_past(made_at: int, current: int) -> None:
    memory = empty()
    writer, reader = GenerationWriter(memory, GEOMETRY), GenerationReader(memory, GEOMETRY)
    if current:
        writer.raise_to(b"aaaabbbb", current)
    key = make_key(b"aaaabbbb", bytes(range(32)), made_at)
    assert len(key) == 32 and generation_of(key) == made_at
    for table in (writer, reader):
        refusal = table.refusal(key)
        assert (refusal is not None) == (made_at < current)
        if refusal is not None:
            assert f"generation {made_at}," in str(refusal) and f"generation {current} " in str(refusal)
        assert table.refusal(b"another." + key[8:]) is None


def test_a_damaged_count_makes_no_reader_leave_the_table(memory: mmap.mmap) -> None:
    writer = GenerationWriter(memory, GEOMETRY)
    writer.raise_to(b"aaaabbbb", 1)
    memory[GEOMETRY.generations_at : GEOMETRY.generations_at + 8] = b"\xff" * 8
    assert GenerationReader(memory, GEOMETRY).current(b"nowhere.") == 0
