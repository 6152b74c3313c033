"""The entries that are possible after a crash: for each key a set of versions, by the answers so far.

Owns: keys, payloads and the table; and what may be wrong with an index while its daemon is idle. Does not own clients.

An answer leaves one possible version. A call without an answer leaves two: the daemon carried it out or not. The
version that a read then finds is the right one, and must stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, Final

import numpy as np

import tensord
from tensord.errors import Corrupt
from tensord.shm.index.index import IndexWriter
from tensord.shm.ring.layout import ALIGN_BYTES, PAGE_BYTES, SPAN_HEADER_BYTES, Superblock, span_bytes

from ..daemon_process import SHM_FOLDER

NUMBERS: Final = 40
FAMILIES: Final = 3
_HISTORY: Final = 12
"""The number of events of a name that the message of a failure lists."""
LARGE_BYTES: Final = 160 << 10
PARTS_BYTES: Final = (64 << 10) - SPAN_HEADER_BYTES - ALIGN_BYTES
"""Of words. With header and tree these are 16 whole pages, so that giving pages back takes no neighbour along."""
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)

Words = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True)
class Name:
    """Key `number` of a family's namespace at a generation."""

    family: int
    generation: int
    number: int

    @property
    def key(self) -> bytes:
        return _key(self)


@cache
def _key(name: Name) -> bytes:
    return namespace(name.family, name.generation).key("crash", "bytes", name.number.to_bytes(4, "little"))


def namespace(family: int, generation: int) -> tensord.Namespace:
    return tensord.Namespace(
        model="crashes", revision=str(family), dtype="uint64", processor="none", generation=generation
    )


def words_of(name: Name, version: int) -> Words:
    """f(key, version): each pair has its own size, and every word differs from other payloads' words at that place."""
    kind = name.number % 10
    size_bytes = LARGE_BYTES if kind == 9 else PARTS_BYTES if kind == 8 else 512 + version * 1736 % 16000 // 8 * 8
    first = np.uint64(name.family << 60 | name.generation % 256 << 52 | name.number << 32 | version)
    return np.arange(size_bytes // 8, dtype=np.uint64) * _GOLDEN + first


def tree_of(name: Name, version: int) -> Any:
    words = words_of(name, version)
    return words if name.number % 2 else {"number": name.number, "words": words}


def array_of(name: Name, tree: Any) -> Words:
    array: Words = tree if name.number % 2 else tree["words"]
    return array


def reserved_by(client: tensord.Client, name: Name, tree: Any) -> tensord.Reservation:
    """A reservation that is filled with a payload."""
    words = array_of(name, tree)
    spec = tensord.Spec(words.shape, "uint64")
    reserved = client.reserve(spec if name.number % 2 else {"number": name.number, "words": spec})
    np.copyto(array_of(name, reserved.tree), words)
    return reserved


def version_of(name: Name, tree: Any) -> int:
    """The version of `name` that a payload is. Raises AssertionError if it is none."""
    words = array_of(name, tree)
    version = int(words[0]) & 0xFFFFFFFF
    assert np.array_equal(words, words_of(name, version)), f"wrong: {name} holds {words[:2]}… of {words.nbytes} bytes"
    assert name.number % 2 or tree["number"] == name.number, f"wrong: the payload of {name} names {tree['number']}"
    return version


class Held(list[tuple[Name, int, Any]]):
    """Views that a client holds: names, versions and payloads."""

    def keep(self, name: Name, lease: tensord.Lease) -> None:
        """Asserts that the lease has a payload of `name`, and holds it."""
        self.append((name, version_of(name, lease.tree), lease.tree))

    def check(self) -> None:
        for name, version, tree in self:
            assert version_of(name, tree) == version, f"wrong: a view of {name} has changed"


@dataclass
class Model:
    """The possible versions of each name; None: not cached. `lossy`: any entry may be gone but those in `kept`."""

    lossy: bool = False
    possible: dict[Name, set[int | None]] = field(default_factory=dict)
    kept: list[Name] = field(default_factory=list)
    generations: list[int] = field(default_factory=lambda: [0] * FAMILIES)
    checked: int = 0
    _version: int = 0
    _history: dict[Name, deque[str]] = field(default_factory=dict)

    def new_version(self) -> int:
        self._version += 1
        return self._version

    def name(self, family: int, number: int) -> Name:
        return Name(family, self.generations[family], number)

    def of(self, name: Name) -> set[int | None]:
        return self.possible.setdefault(name, {None})

    def put(self, name: Name, version: int, state: str) -> None:
        """A put of `version` was answered with `state`; "unknown" without an answer."""
        before = self.of(name)
        self._note(name, f"put {version} {state}")
        match state:
            case "stored":
                assert self.lossy or None in before, f"{name} was stored over an entry that must exist: {before}"
                self.possible[name] = {version}
                self.kept.append(name)
            case "existed":
                there = before - {None}
                assert there, f"{name} existed but was never put"
                self.possible[name] = there
                # A put that was sent again may have been stored the first time.
                self.kept.append(name)
            case "refused":
                pass
            case "lost" | "unknown":
                if None in before or self.lossy:
                    self.possible[name] = before | {version}
            case _:
                raise AssertionError(f"a put was {state}")

    def ended(self, names: Iterable[Name], *, surely: bool) -> None:
        """The names were evicted; if not `surely`, they may have been."""
        for name in names:
            self._note(name, "ended" if surely else "perhaps ended")
            self.possible[name] = {None} if surely else self.of(name) | {None}

    def family(self, family: int) -> list[Name]:
        """All names of a family that were ever used."""
        return [name for name in self.possible if name.family == family]

    def check(self, client: tensord.Client, answers: Callable[[], bool], keep: int = 0) -> None:
        """Checks that every name has a possible version. The one that is found becomes the only possible one.
        `answers`: whether the daemon answers. If it has ended by the end of the check, a miss is no evidence: it may
        have died between the two stores of a publication, which the next daemon completes. `keep`: in a lossy store,
        the number of newest entries that must be cached."""
        kept = set(self.kept[-keep:]) if keep else set()
        missed: list[Name] = []
        for name, possible in self.possible.items():
            try:
                # In a lossy store a read that counts as a use would decide who goes next.
                lease = client.hold(name.key) if self.lossy else client.get(name.key, verify=True)
            except Corrupt as error:
                raise AssertionError(f"torn: {name}: {error}") from None
            self.checked += 1
            found = None if lease is None else version_of(name, lease.tree)
            self._note(name, f"found {found}")
            if found is None and self.lossy and name not in kept:
                missed.append(name)
                continue
            assert found in possible, (
                f"{'lost' if found is None else 'wrong'}: {name} is {found}, may be {possible}; the last version is "
                f"{self._version}, the generations are {self.generations}; history: {', '.join(self._history[name])}"
            )
            if found is None:
                missed.append(name)
            else:
                self.possible[name] = {found}
        if missed and answers():
            self.possible.update((name, {None}) for name in missed)
        for name in [n for n in self.possible if self._is_past(n)]:
            del self.possible[name]
            del self._history[name]

    def _note(self, name: Name, event: str) -> None:
        self._history.setdefault(name, deque(maxlen=_HISTORY)).append(event)

    def _is_past(self, name: Name) -> bool:
        """True if no process asks for the name any more."""
        if self.lossy:
            return self.possible[name] == {None}
        return name.generation < self.generations[name.family] - 1


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
