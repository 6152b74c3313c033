"""What a replacement policy is: the base class from which every policy derives.

A policy owns the order in which spans go, and nothing else. The store decides which spans may go (`core.span_table`)
and how much must go. Policies name spans by id and not by key, because the access log that readers keep does the same.

A policy must implement the seven abstract methods. The other methods have defaults, for a policy that knows nothing of
agents, turns nobody away, counts no uses and learns nothing.

A class that derives from `Replacement` with `name="..."` is registered under that name. `registry` imports every module
of this package, so that a new policy needs no line anywhere else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar, Literal

from .candidate import Candidate
from .explained import Explained

Turn = Literal["tool_call", "turn_ended", "finished"]


class Replacement(ABC):
    """An order, from cold to warm, over the spans that may go."""

    name: ClassVar[str]
    """The policy's name in the configuration."""
    new_may_go_first: ClassVar[str] = ""
    """Why a new entry may go before entries that are in use. Empty: a new entry stays for a while, whatever is in use.
    The conformance suite does not ask this promise of a policy that gives a reason."""
    registered: ClassVar[dict[str, type[Replacement]]] = {}
    """Every policy that was imported so far, by name. `registry.POLICIES` has all of them."""

    def __init_subclass__(cls, name: str = "", **more: object) -> None:
        super().__init_subclass__(**more)
        if name:
            assert name not in Replacement.registered, f"two policies are named {name}"
            cls.name = name
            Replacement.registered[name] = cls

    # ---- what a policy must implement

    @abstractmethod
    def __len__(self) -> int:
        """How many spans are known."""

    @abstractmethod
    def inserted(self, new: Candidate, now: float) -> None:
        """A new span was published. It was not known before, and it may go. Its publication is its first use."""

    @abstractmethod
    def accessed(self, span_id: int, now: float, agent: str = "") -> None:
        """A known span was used, on behalf of `agent` where that is known. Blocks of a sequence come first to last."""

    @abstractmethod
    def may_go(self, span_id: int, it_may: bool) -> None:
        """A known span may go from now on, or may not."""

    @abstractmethod
    def removed(self, span_id: int, *, evicted: bool) -> None:
        """A known span is gone: as a victim (`evicted`), or for another reason."""

    @abstractmethod
    def coldest(self, owners: Collection[int] | None = None) -> Iterator[int]:
        """Yields the spans that may go, coldest first. With `owners` it yields only the spans of these uids, without
        a walk over the others. The iterator is lazy, and valid until the next change."""

    @abstractmethod
    def rank(self, span_id: int) -> tuple[float, ...]:
        """The warmth of a known span: lower is colder, and no two spans have the same rank.

        The first number is what a byte of the span is worth to the store where it compares groups of spans. A policy
        that knows only an order gives every span the same first number.
        """

    # ---- what a policy may implement

    def turn(self, agent: str, state: Turn, now: float) -> None:
        """A client told in which state an agent is. Default: the policy ignores it."""
        return

    def admits(self, new: Candidate, victim: int) -> bool:
        """Whether `new`, which is not stored yet, is worth more than `victim`, which would have to go for it. Default:
        always.

        The store asks this only about blocks that follow another block of a sequence. Every other put is promised its
        place.
        """
        return True

    @property
    def window_bytes(self) -> int | None:
        """Bytes of the known spans that are so new that they go only if nothing else may. None: the policy has no such
        window, which is the default."""
        return None

    def worth(self, span_id: int) -> float:
        """What the policy goes by: of two spans that may go and are outside the window, the one that is worth less goes
        first. Default: the first number of the rank."""
        return float(self.rank(span_id)[0])

    def explain(self, span_id: int) -> Explained:
        """What the policy knows of a known span. Default: its worth."""
        return Explained(self.worth(span_id))

    def recall(self, key: bytes) -> Explained | None:
        """What the policy knows, as of now, of a key whose entry is gone. Its worth may leave out cost and size. None:
        it remembers nothing of the key, which is the default."""
        return None

    def learned(self) -> Iterator[bytes]:
        """What the policy knows, for the policy of the same name in the next daemon. Default: nothing.

        Each part takes some milliseconds to make, and the policy may change between two parts.
        """
        return iter(())

    def learn(self, data: Sequence[bytes]) -> None:
        """Takes over what a policy of the same name yielded from `learned`. Default: ignores it.

        It is called once, after the spans of the former daemon were inserted. These have kept their ids. Some spans
        that `data` names are gone, and some spans are new.

        Raises:
            ValueError: `data` is not what this policy yields.
        """
        return

    def check_invariants(self) -> None:
        """Asserts what the policy's own structures promise each other. Default: nothing."""
        return
