"""The base class of replacement policies.

A policy owns the order in which spans are evicted, and nothing else. The store decides which spans may be evicted
(`core.span_table`) and how many. Policies identify spans by id and not by key, because the access logs of readers do
the same.

A policy must implement the seven abstract methods. The other methods have defaults, for a policy that ignores agents,
refuses no entry, counts no uses and learns nothing.

A class that derives from `Replacement` with `name="..."` is registered under that name. `registry` imports every module
of this package, so that a new policy needs no line anywhere else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import ClassVar, Literal

from .candidate import Candidate
from .explained import Explained

Turn = Literal["began", "tool_call", "turn_ended", "finished"]


class Replacement(ABC):
    """An order of the spans that may be evicted, from cold to warm."""

    name: ClassVar[str]
    """The policy's name in the configuration."""
    new_may_go_first: ClassVar[str] = ""
    """The reason why a new entry may be evicted before entries in use. Empty: a new entry always stays for a while. The
    conformance suite tests that promise only for policies without a reason."""
    compares_puts_with_reads: ClassVar[bool] = False
    """Whether a new entry is ranked by the time of its put among the reads of other entries. The store then reads the
    lanes at every put, also at one that needs no eviction, and calls `drained`."""
    ranks_by_worth: ClassVar[bool] = False
    """Whether spans of equal worth may be evicted in any order. If not, the order decides which of several groups of
    equal worth is evicted."""
    registered: ClassVar[dict[str, type[Replacement]]] = {}
    """The policies imported so far, by name. `registry.POLICIES` has all of them."""

    def __init_subclass__(cls, name: str = "", **more: object) -> None:
        super().__init_subclass__(**more)
        if name:
            assert name not in Replacement.registered, f"two policies are named {name}"
            cls.name = name
            Replacement.registered[name] = cls

    # ---- what a policy must implement

    @abstractmethod
    def __len__(self) -> int:
        """The number of known spans."""

    @abstractmethod
    def inserted(self, new: Candidate, now: float) -> None:
        """Adds a published span, which was not known before and may be evicted. The publication is its first use."""

    @abstractmethod
    def accessed(self, span_id: int, now: float, agent: str = "") -> None:
        """A known span was used, by `agent` if that is known. Uses of the blocks of a sequence come in their order."""

    @abstractmethod
    def may_go(self, span_id: int, it_may: bool) -> None:
        """Says whether a known span may be evicted from now on."""

    @abstractmethod
    def removed(self, span_id: int, *, evicted: bool) -> None:
        """A known span was removed: as a victim (`evicted`), or for another reason."""

    @abstractmethod
    def coldest(self, owners: Collection[int] | None = None) -> Iterator[int]:
        """Yields the spans that may be evicted, coldest first. With `owners` it yields only the spans of these uids,
        without visiting the others. The iterator is lazy, and valid until the next change."""

    @abstractmethod
    def rank(self, span_id: int) -> tuple[float, ...]:
        """The warmth of a known span: lower is colder, and no two spans have the same rank.

        The first number is the worth of a byte of the span, by which the store compares groups of spans. A policy that
        has only an order gives every span the same first number.
        """

    # ---- what a policy may implement

    def turn(self, agent: str, state: Turn, now: float) -> None:
        """A client has reported the state of an agent. Default: the policy ignores it."""
        return

    def put_again(self, span_id: int) -> None:
        """A put named the key of a known span. `accessed` was called before. Default: a put is no more than a use."""
        return

    def recovered(self, by_put: Iterable[int]) -> None:
        """Says in which order all known spans were put, the latest last. They were inserted in the order of their last
        uses. Called once, after a restart. Default: the order of last uses is enough."""
        return

    def drained(self, *, reads: bool) -> None:
        """All reads that clients recorded before the last puts were reported. Readers record reads without a time, so
        such a read may have been reported after a put that it preceded. `reads`: whether any read was reported since
        the last call. Default: the policy needs no such news."""
        return

    def admits(self, new: Candidate, victim: int) -> bool:
        """True if `new`, which is not stored yet, is worth at least as much as `victim`, which would be evicted for it.
        Default: always true.

        The store asks this only for blocks with a parent block. Every other put is always admitted.
        """
        return True

    @property
    def window_bytes(self) -> int | None:
        """The bytes of new spans that are evicted only if no other span can be. None, the default: the policy has no
        such window."""
        return None

    def worth(self, span_id: int) -> float:
        """The worth of a known span. Of two spans outside the window, the one with the lower worth is evicted first.
        Default: the first number of the rank."""
        return float(self.rank(span_id)[0])

    def explain(self, span_id: int) -> Explained:
        """The policy's knowledge of a known span. Default: its worth."""
        return Explained(self.worth(span_id))

    def recall(self, key: bytes) -> Explained | None:
        """The policy's current knowledge of a key whose entry was evicted. Its worth may leave out cost and size. None,
        the default: the policy does not remember the key."""
        return None

    def learned(self) -> Iterator[bytes]:
        """The policy's state, for the policy of the same name in the next daemon. Default: nothing.

        Making a part takes some milliseconds. The policy may change between two parts.
        """
        return iter(())

    def learn(self, data: Sequence[bytes]) -> None:
        """Restores the state that a policy of the same name yielded from `learned`. Default: ignores it.

        Called once, after the spans of the former daemon were inserted with their old ids. Some spans in `data` may no
        longer exist, and some spans may be missing in `data`.

        Raises:
            ValueError: `data` is not a state of this policy.
        """
        return

    def check_invariants(self) -> None:
        """Asserts the invariants of the policy's structures. Default: nothing."""
        return
