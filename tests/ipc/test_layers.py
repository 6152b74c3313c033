"""To which positions each kind of layer can go back, and which sequences share blocks."""

from __future__ import annotations

import pytest

from tensord.errors import BadPrefix
from tensord.ipc.layers import Kind, Layer, can_rewind_to, layout

POSITIONS = range(14)


def reachable(layer: Layer) -> list[int]:
    return [position for position in POSITIONS if can_rewind_to(layer, position)]


def test_a_normal_layer_rewinds_anywhere_it_covers() -> None:
    assert reachable(Layer("normal", 10)) == list(range(11))


def test_a_shared_layer_rewinds_anywhere() -> None:
    assert reachable(Layer("shared")) == list(POSITIONS)


@pytest.mark.parametrize("window", [10, 11, 100])
def test_a_window_that_has_not_rolled_over_is_as_a_normal_layer(window: int) -> None:
    assert reachable(Layer("rotating", 10, window)) == list(range(11))


@pytest.mark.parametrize("window", [1, 4, 9])
def test_a_window_that_has_rolled_over_goes_on_from_its_end_only(window: int) -> None:
    assert reachable(Layer("rotating", 10, window)) == [10]


def test_the_rules_as_they_were_read_say_the_same_of_windows() -> None:
    """Not m > cur, not (cur > w and m < cur), not cur − m > w."""
    for window in range(1, 12):
        for length in range(12):
            layer = Layer("rotating", length, window)
            for m in POSITIONS:
                refused = m > length or (length > window and m < length) or length - m > window
                assert can_rewind_to(layer, m) == (not refused), (window, length, m)


def test_a_recurrent_layer_goes_on_from_its_snapshots_only() -> None:
    assert reachable(Layer("recurrent", 10, snapshots=(3, 8))) == [3, 8]
    assert reachable(Layer("recurrent", 10, snapshots=(10,))) == [10]
    assert reachable(Layer("recurrent", 10)) == []


@pytest.mark.parametrize(
    ("layer", "whole", "exact"),
    [
        (Layer("normal", 9), True, False),
        (Layer("rotating", 9, 9), True, False),
        (Layer("rotating", 9, 8), False, True),
        (Layer("recurrent", 9), False, True),
        (Layer("shared"), False, False),
    ],
)
def test_a_layer_is_stored_in_blocks_or_in_snapshots(layer: Layer, whole: bool, exact: bool) -> None:
    assert (layer.whole, layer.exact) == (whole, exact)
    assert layout([layer], 16)[1] == exact
    assert layout([Layer("normal", layer.length), layer], 16)[1] == exact


def test_sequences_of_any_length_share_blocks_unless_a_window_has_rolled_over() -> None:
    def digest(length: int, kind: Kind = "normal", window: int = 0, block_tokens: int = 16) -> bytes:
        layers = [Layer("normal", length), Layer(kind, length if kind != "shared" else 0, window)]
        return layout(layers, block_tokens)[0]

    assert digest(5) == digest(500)
    assert digest(5, "rotating", 8) == digest(8, "rotating", 8) != digest(9, "rotating", 8)
    assert digest(9, "rotating", 8) == digest(90, "rotating", 8)
    others = [
        digest(5),
        digest(5, "shared"),
        digest(5, "recurrent"),
        digest(5, "rotating", 8),
        digest(5, "rotating", 9),
        digest(5, block_tokens=32),
    ]
    assert len(set(others)) == len(others)
    assert all(len(digest) == 16 for digest in others)


def test_the_order_of_layers_counts() -> None:
    one, two = Layer("normal", 5), Layer("recurrent", 5)
    assert layout([one, two], 16) != layout([two, one], 16)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_layers_that_disagree_on_their_length_are_refused_and_named(place: int) -> None:
    layers = [Layer("shared"), Layer("normal", 10), Layer("rotating", 10, 4), Layer("recurrent", 10)]
    layers.insert(place, Layer("normal", 11))
    with pytest.raises(BadPrefix, match=r"layer \d \(\w+\) has processed 1[01] tokens"):
        layout(layers, 16)


def test_layers_without_a_length_of_their_own_agree_with_all() -> None:
    assert layout([Layer("shared"), Layer("shared")], 16)[1] is False
    assert layout([], 16)[1] is False
