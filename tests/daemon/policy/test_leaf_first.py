"""What follows another goes before it, and what becomes free behind that stands where its rank has it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.policy.leaf_first import leaf_first


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 1000)), max_size=40))
def test_each_span_comes_once_after_its_children_and_no_later_than_by_rank(
    spans: list[tuple[int, int]],
) -> None:
    parent = {number: above if above < number else None for number, (above, _) in enumerate(spans)}
    rank = {number: (warmth, number) for number, (_, warmth) in enumerate(spans)}
    children = {number: list(parent.values()).count(number) for number in parent}
    leaves = sorted((number for number in parent if not children[number]), key=rank.__getitem__)
    order = list(leaf_first(leaves, rank.__getitem__, parent.__getitem__, children.__getitem__))
    assert sorted(order) == sorted(parent)
    place = {number: at for at, number in enumerate(order)}
    for number, above in parent.items():
        assert above is None or place[number] < place[above]
    left = dict(children)
    may_go = {number for number in parent if not children[number]}
    for number in order:
        assert number == min(may_go, key=rank.__getitem__)
        may_go.remove(number)
        above = parent[number]
        if above is not None:
            left[above] -= 1
            if not left[above]:
                may_go.add(above)
