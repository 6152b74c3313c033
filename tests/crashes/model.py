"""What must be there after a crash: for each key the versions that are possible, by the answers that were given.

Owns: keys, payloads and the table. Does not own clients.

An answer leaves one possibility. A call whose answer never came leaves two: it was carried out, or it was not. Whatever
is then found is the one that it was, and must stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import numpy as np

import tensord
from tensord.errors import Corrupt
from tensord.shm.layout import ALIGN_BYTES, SPAN_HEADER_BYTES

NUMBERS: Final = 40
FAMILIES: Final = 3
_HISTORY: Final = 12
"""Events of a name that a failure's message tells."""
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
    """f(key, version): of a size of its own, every word unlike any other payload's at that place."""
    kind = name.number % 10
    size_bytes = LARGE_BYTES if kind == 9 else PARTS_BYTES if kind == 8 else 512 + version * 1736 % 16000 // 8 * 8
    first = np.uint64(name.family << 60 | name.generation % 256 << 52 | name.number << 32 | version)
    return np.arange(size_bytes // 8, dtype=np.uint64) * _GOLDEN + first


def tree_of(name: Name, version: int) -> Any:
    """One array, or a tree that holds one."""
    words = words_of(name, version)
    return words if name.number % 2 else {"number": name.number, "words": words}


def version_of(name: Name, tree: Any) -> int:
    """Which version of `name` a payload is.

    Raises:
        AssertionError: it is none.
    """
    words = tree if name.number % 2 else tree["words"]
    version = int(words[0]) & 0xFFFFFFFF
    assert np.array_equal(words, words_of(name, version)), f"wrong: {name} holds {words[:2]}… of {words.nbytes} bytes"
    assert name.number % 2 or tree["number"] == name.number, f"wrong: {name} says that it is {tree['number']}"
    return version


@dataclass
class Model:
    """The versions that each name may have; None: it is not there. `lossy`: anything but what is `kept` may be gone."""

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
        """A put of `version` was answered with `state`; "unknown" where nobody answered."""
        before = self.of(name)
        self._note(name, f"put {version} {state}")
        match state:
            case "stored":
                assert self.lossy or None in before, f"{name} was stored over {before}"
                self.possible[name] = {version}
                self.kept.append(name)
            case "existed":
                there = before - {None}
                assert there, f"{name} existed, and was never put"
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
        """The names were evicted, or perhaps."""
        for name in names:
            self._note(name, "ended" if surely else "perhaps ended")
            self.possible[name] = {None} if surely else self.of(name) | {None}

    def family(self, family: int) -> list[Name]:
        """All names of a family that were ever used."""
        return [name for name in self.possible if name.family == family]

    def check(self, client: tensord.Client, answers: Callable[[], bool], keep: int = 0) -> None:
        """Every name is what it may be; what was found is what it is from now on.

        Args:
            answers: whether the daemon answers. If it has ended by the end of the check, a miss tells nothing: the
                daemon may have died between the two stores of a publication, and the next daemon completes it.
            keep: in a lossy store so many of those stored last must be there.

        Raises:
            AssertionError: "lost", "torn" or "wrong", with the name.
        """
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
                f"{self._version}, the generations are {self.generations}, and before: {', '.join(self._history[name])}"
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
        """Keeps what happened to a name last, for the message of a failure."""
        self._history.setdefault(name, deque(maxlen=_HISTORY)).append(event)

    def _is_past(self, name: Name) -> bool:
        """Whether nobody will ask for it any more."""
        if self.lossy:
            return self.possible[name] == {None}
        return name.generation < self.generations[name.family] - 1
