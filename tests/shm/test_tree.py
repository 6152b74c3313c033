"""What a tree may hold; and where it may not, the error says where, what, and what to do."""

from __future__ import annotations

import collections
import enum
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest

from tensord.errors import ObjectTooLarge, UnsupportedLeaf
from tensord.shm.payloads.dtypes import dtype_named
from tensord.shm.payloads.packing import pack, pack_spec
from tensord.shm.payloads.recipe import recipe
from tensord.shm.payloads.specs import Spec


class Colour(enum.IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int


class Marked(np.ndarray[Any, Any]):
    pass


@pytest.mark.parametrize(
    ("leaf", "what", "remedy"),
    [
        (object(), "builtins.object", "np.asarray"),
        ({1, 2}, "builtins.set", "np.asarray"),
        (bytearray(b"x"), "builtins.bytearray", r"bytes\(x\)"),
        (collections.OrderedDict(a=1), "collections.OrderedDict", r"dict\(x\)"),
        (Point(1), "Point", r"tuple\(x\)"),
        (Colour.RED, "Colour", r"int\(x\)"),
        (1 << 64, r"an int out of the range from -2\*\*63 to 2\*\*64 - 1", "str or bytes"),
        ([1, 1 << 64], r"\[1\] is an int out of the range", "str or bytes"),
        (np.array([object()]), "numpy array of dtype object", "dict or list"),
        (np.zeros(2, "f4,f4"), r"numpy array of dtype \[", "dict or list"),
        (np.zeros(2, "V3"), r"numpy array of dtype \|V3", "pass numbers"),
        (np.ma.masked_array([1, 2], [False, True]), "MaskedArray", "plain arrays"),
        (np.zeros(2).view(Marked), "Marked", "plain arrays"),
        ({1.5: 0}, "the key 1.5 of type float", "keys are"),
        ({True: 0}, "the key True of type bool", "keys are"),
        ({1 << 64: 0}, "the key 18446744073709551616 of type int", "keys are"),
        (Spec((1,), "f4"), "a Spec", "array"),
    ],
)
def test_an_unsupported_leaf_is_refused_with_place_type_and_remedy(leaf: Any, what: str, remedy: str) -> None:
    with pytest.raises(UnsupportedLeaf, match=rf"^tree\['a'\]\[2\].*{what}.*; .*{remedy}"):
        pack({"a": (0, "", leaf)})


@pytest.mark.parametrize("kind", [list, dict])
def test_a_tree_that_contains_itself_is_refused(kind: type) -> None:
    inner: Any = kind()
    tree = {"a": [0, inner]}
    if isinstance(inner, dict):
        inner["back"] = tree
    else:
        inner.append(tree)
    with pytest.raises(UnsupportedLeaf, match=r"^tree\['a'\]\[1\]\[.*\] is a dict that contains it"):
        pack(tree)


def nested(levels: int, leaf: Any) -> Any:
    for _ in range(levels):
        leaf = [leaf]
    return leaf


def doubled(levels: int) -> Any:
    """A tree that is not walked as a whole: it has twice as many nodes at each level."""
    tree: Any = [np.zeros(1)]
    for _ in range(levels):
        tree = [tree, tree]
    return tree


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (doubled(60), "more than 16384 nodes"),
        ([*[None] * 16_383, np.zeros(1)], "more than 16384 nodes"),
        (nested(64, []), r"^tree(\[0\]){64} is nested deeper .* of 64"),
        (["x" * 60] * 20_000, r"takes 12\d\d\d\d\d bytes, the limit is 1048576; shorten"),
        ([None] * (1 << 17), r"more than 131072 values.*; turn lists into arrays"),
        ([np.broadcast_to(np.zeros(1), (1 << 30, 1 << 20))], r"tree\[0\] has shape \(1073741824, 1048576\) of <f8"),
        ([np.broadcast_to(np.uint8(0), (1 << 47,))] * 2, f"the tree takes {(1 << 48) + 64} bytes"),
    ],
    ids=["doubled", "nodes", "depth", "header", "values", "array", "bytes"],
)
def test_a_tree_over_a_limit_is_refused_and_the_limit_named(tree: Any, says: str) -> None:
    with pytest.raises((ObjectTooLarge, UnsupportedLeaf), match=says):
        pack(tree)


def test_a_tree_at_its_limits_is_taken() -> None:
    pack([*[None] * 16_382, np.zeros(1)])
    pack(nested(63, []))
    pack(["x" * 60] * 16_000)
    pack([None] * ((1 << 17) - 3))  # one node: scalars among themselves are read in one step
    for packs in (pack, pack_spec):
        packs([[[]]], depth_max=3)
        with pytest.raises(UnsupportedLeaf, match="of 2; flatten"):
            packs([[[]]], depth_max=2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "<M8[ns]", np.dtype(">i2"), np.float64])
def test_a_spec_makes_memory_to_write_into(dtype: Any) -> None:
    plan = pack_spec({"out": Spec((2, 3), dtype), "layer": 7, "mask": np.ones(4, bool)})
    memory = np.full(plan.payload_bytes, 0xA5, np.uint8)
    plan.write(memory.data, 0)
    made = recipe(plan.header).view(memory)
    assert made["layer"] == 7
    assert made["out"].dtype == (dtype_named(dtype) if dtype == "bfloat16" else np.dtype(dtype))
    assert made["mask"].all()
    assert (made["out"].view(np.uint8) == 0xA5).all()
    made["out"].view(np.uint8)[:] = 1
    assert (recipe(plan.header).view(memory)["out"].view(np.uint8) == 1).all()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (Spec((1,), object), "dtype <class 'object'>"),
        (Spec((1,), None), "dtype None"),
        (Spec((1,), "no such"), "dtype 'no such'"),
        (Spec((1,), "S"), "dtype 'S'"),
        (Spec((-1,), "f4"), r"shape \(-1,\).* none negative"),
        (Spec((1.5,), "f4"), r"shape \(1.5,\)"),  # type: ignore[arg-type]
        (Spec(3, "f4"), "shape 3"),  # type: ignore[arg-type]
        (Spec((1,) * 65, "f4"), "up to 64 ints"),
    ],
)
def test_a_spec_that_no_leaf_can_meet_is_refused(spec: Spec, reason: str) -> None:
    with pytest.raises(UnsupportedLeaf, match=rf"^tree\[0\] is a Spec of {reason}|{reason}"):
        pack_spec([spec])


def test_torch_is_not_imported_for_trees_without_tensors() -> None:
    program = """
import sys, numpy as np
from tensord.shm.payloads.packing import pack
from tensord.shm.payloads.recipe import recipe
payload = pack({"a": np.ones(3), "b": [1, "x" * 999]})
root = np.zeros(payload.payload_bytes, np.uint8)
payload.write(root.data, 0)
made = recipe(payload.header)
assert made.view(root)["a"].tolist() == made.value(root)["a"].tolist() == [1, 1, 1]
assert "torch" not in sys.modules
assert "pickle" not in payload.header.decode("latin1")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
