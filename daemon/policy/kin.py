"""Who follows whom among the spans: a piece of a cached sequence is of no use once the piece before it is gone.

So only leaves may go, a span all of whose followers are gone or hidden. Owns the counts; every policy goes by them.

Invariant: every known span's parent, if it was known at its insertion, is known as long as the span is.
"""

from __future__ import annotations

from collections.abc import Iterator


class Kin:
    """Parents of known spans, and how many followers of each are neither hidden nor gone. O(1) an operation."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}
        self._followers: dict[int, int] = {}
        self._hidden: set[int] = set()

    def inserted(self, span_id: int, parent: int | None) -> None:
        if parent is not None:
            self._parent[span_id] = parent
            self._followers[parent] = self._followers.get(parent, 0) + 1

    def hidden(self, span_id: int) -> None:
        assert span_id not in self._hidden, span_id
        self._hidden.add(span_id)
        self._leaves(span_id)

    def shown(self, span_id: int) -> None:
        self._hidden.remove(span_id)
        parent = self._parent.get(span_id)
        if parent is not None:
            self._followers[parent] = self._followers.get(parent, 0) + 1

    def removed(self, span_id: int) -> None:
        if span_id in self._hidden:
            self._hidden.remove(span_id)
        else:
            self._leaves(span_id)
        self._parent.pop(span_id, None)
        self._followers.pop(span_id, None)

    def parent(self, span_id: int) -> int | None:
        """What the span follows."""
        return self._parent.get(span_id)

    def is_hidden(self, span_id: int) -> bool:
        return span_id in self._hidden

    def is_leaf(self, span_id: int) -> bool:
        """Whether nothing that is shown follows the span."""
        return span_id not in self._followers

    def followers(self, span_id: int) -> int:
        """How many that are shown follow the span."""
        return self._followers.get(span_id, 0)

    def leaves_first(self, order: Iterator[int]) -> Iterator[int]:
        """The spans of `order` that are not hidden, each only once all its followers have come; one that was passed
        over comes right behind the last of them."""
        left: dict[int, int] = {}
        passed: set[int] = set()
        for span_id in order:
            if span_id in self._hidden:
                continue
            if left.get(span_id, self._followers.get(span_id, 0)):
                passed.add(span_id)
                continue
            yield span_id
            parent = self._parent.get(span_id)
            while parent is not None:
                left[parent] = left.get(parent, self._followers.get(parent, 0)) - 1
                if left[parent] or parent not in passed:
                    break
                yield parent
                parent = self._parent.get(parent)

    def check_invariants(self, known: set[int]) -> None:
        """Asserts what the module's docstring promises."""
        assert self._hidden <= known and self._parent.keys() <= known
        counted: dict[int, int] = {}
        for span_id, parent in self._parent.items():
            if span_id not in self._hidden and parent in known:
                counted[parent] = counted.get(parent, 0) + 1
        assert counted == {span: count for span, count in self._followers.items() if span in known}

    def _leaves(self, span_id: int) -> None:
        parent = self._parent.get(span_id)
        if parent is not None and parent in self._followers:
            self._followers[parent] -= 1
            if not self._followers[parent]:
                del self._followers[parent]
