"""Which entry goes first when the store needs room: the interface, and the policies by name.

A policy owns an order of the spans that may go, nothing else: not which may (`core.span_table`: what is published, and
what nothing follows), nor how much must go. Policies name spans, not keys, because the access log that readers keep
does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final, Literal, Protocol

from ...errors import BadConfiguration
from .candidate import Candidate
from .explained import Explained
from .hazard import Hazard
from .lfu import LFU
from .lru import LRU

Turn = Literal["tool_call", "turn_ended", "finished"]


class Replacement(Protocol):
    """An order from cold to warm over the spans that may go."""

    @property
    def name(self) -> str:
        """The policy's name in the configuration."""
        ...

    def __len__(self) -> int: ...

    def inserted(self, new: Candidate, now: float) -> None:
        """A new span, not known so far, which may go; its publication is its first use."""
        ...

    def accessed(self, span_id: int, now: float, agent: str = "") -> None:
        """A use of a known span, for `agent` where that is known. Of a sequence the first piece comes first."""
        ...

    def may_go(self, span_id: int, it_may: bool) -> None:
        """Whether a known span may go has changed."""
        ...

    def removed(self, span_id: int, *, evicted: bool) -> None:
        """A known span is gone: as a victim (`evicted`), or otherwise."""
        ...

    def turn(self, agent: str, state: Turn, now: float) -> None:
        """What is known of an agent's next turn."""
        ...

    def admits(self, new: Candidate, victim: int) -> bool:
        """Whether `new`, which is not stored so far, is worth `victim`, which would have to go for it. Asked of pieces
        of sequences only: whoever stores anything else is promised that it is there."""
        ...

    def coldest(self, owners: Collection[int] | None = None) -> Iterator[int]:
        """The spans that may go, coldest first. `owners`: only theirs, without a walk over the others'. Lazy: valid
        until the next change."""
        ...

    def rank(self, span_id: int) -> tuple[float, ...]:
        """A known span's warmth: lower is colder, and no two are equal."""
        ...

    @property
    def window_bytes(self) -> int | None:
        """Bytes of the known spans that were put so lately that they go only if nothing else may; None: the policy has
        no such window."""
        ...

    def worth(self, span_id: int) -> float:
        """What the policy goes by: of two spans that may go and are outside the window, the one that is worth less
        goes first."""
        ...

    def explain(self, span_id: int) -> Explained:
        """What the policy knows of a known span."""
        ...

    def recall(self, key: bytes) -> Explained | None:
        """What the policy knows of a key that it remembers, as of now; None: it remembers nothing of the key. Its worth
        may leave out what the entry cost and took."""
        ...

    def learned(self) -> Iterator[bytes]:
        """What the policy knows, for another of the same name after a restart: in parts, each of which takes some
        milliseconds to make. Between two of them the policy may change."""
        ...

    def learn(self, data: Sequence[bytes]) -> None:
        """Takes over what a policy of the same name had `learned`, once, after the spans of a former daemon were
        inserted. They have kept their ids; some of those that `data` names are gone, and some came later.

        Raises:
            ValueError: no policy of that name has said this.
        """
        ...

    def check_invariants(self) -> None:
        """Asserts what the policy's own structures promise each other."""
        ...


POLICIES: Final[dict[str, type[Replacement]]] = {"lru": LRU, "lfu": LFU, "hazard": Hazard}


def by_name(name: str) -> Replacement:
    """A new, empty policy.

    Raises:
        BadConfiguration: no policy has that name; the message lists those that exist.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise BadConfiguration(f"policy = {name!r} is no policy; choose one of {', '.join(sorted(POLICIES))}")
    return policy()
