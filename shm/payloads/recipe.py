"""Tree headers back into trees: a reader's views of a payload. packing.py is the inverse; header.py has the format.

    recipe(header) -> Recipe          once per header; the caller caches it by the header's bytes
    Recipe.whole(root) -> Recipe      the same, unless the header is long: then the payload itself has it
    Recipe.view(root) -> tree         for every hit

Invariants: the trees of a Recipe keep alive the same `root` object that the caller passed. Their views are read-only if
`root` is read-only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Final

import numpy as np

from ...errors import BadTree, UnsupportedLeaf
from .dtypes import DType
from .header import (
    ARRAY,
    BYTES,
    DEPTH_MAX,
    DICT,
    LIST,
    LONG,
    NUMBERS,
    NUMBERS_TUPLE,
    TENSOR,
    Container,
    LeafAt,
    no_rest,
    read,
)
from .tensors import needed_torch, tensor_copy, tensor_over

Array = np.ndarray[Any, Any]
_LONG_KEPT: Final = 4
"""Recipes of long headers that a process keeps. Each takes up to some 10 MB."""


class Recipe:
    """Makes trees from payloads with one header. Immutable, and shared by all payloads with that header. `single` is
    (shape, dtype, offset) if the tree is one array or tensor, else None; `single_is_tensor` says which of the two.
    `end_bytes` is the end of the last leaf: every payload has at least as many bytes. `is_long`: the header is the
    first leaf, so payloads with one recipe may have different trees."""

    __slots__ = ("_depth_max", "_node", "end_bytes", "is_long", "single", "single_is_tensor")

    def __init__(self, node: Any, end_bytes: int, depth_max: int = DEPTH_MAX) -> None:
        self._node = node
        self._depth_max = depth_max
        self.end_bytes = end_bytes
        tag = node.tag if type(node) is LeafAt else None
        self.is_long = tag == LONG
        self.single_is_tensor = tag == TENSOR
        self.single: tuple[tuple[int, ...], DType, int] | None = None
        if tag in (ARRAY, TENSOR):
            self.single = node.shape, node.dtype, node.offset

    def whole(self, root: Array, rest: Callable[[], object] = no_rest) -> Recipe:
        """The recipe of the tree of one payload, which is not kept. `root`: as for `view`. `rest`: as for `read`.
        Raises BadTree: the header in the payload does not describe a tree, or the payload is shorter than that
        header."""
        return _of_long(*self._header(root), self._depth_max, rest) if self.is_long else self

    @property
    def leaves(self) -> list[LeafAt]:
        """All leaves, in ascending order of offsets."""
        return [node for _, node in _leaves(self._node, "tree")]

    def view(self, root: Array) -> Any:
        """The tree with a numpy view of `root` for every array or tensor leaf. Long str and bytes are copied. `root`:
        the payload, (payload_bytes,) uint8. Every view keeps it alive. A read-only root gives read-only views. Raises
        BadTree: the payload is shorter than its tree."""
        if len(root) < self.end_bytes or type(root.base) is np.ndarray:
            root = self._held(root)
        single = self.single
        if single is not None:
            return np.ndarray(single[0], single[1], root, single[2])
        if self.is_long:
            return _of_long_kept(*self._header(root), self._depth_max).view(root)
        return _made(self._node, lambda leaf: _viewed(leaf, root))

    def torch(self, root: Array, copy: bool = True) -> Any:
        """The tree with a torch tensor for every array, whether it was put as an array or as a tensor. `root`: as for
        `view`. `copy`: False gives tensors over the payload itself, which keep `root` alive. Torch has no read-only
        tensors: if `root` is read-only memory, an in-place operation on such a tensor ends the process with SIGSEGV.

        Raises:
            BadTree: as `view`.
            UsageError: torch is not installed.
            UnsupportedLeaf: torch lacks the dtype of a leaf, or, without a copy, the leaf has the other byte order.
        """
        return self._converted(root, (ARRAY, TENSOR), "lease.torch()", copy)

    def value(self, root: Array, copy: bool = True) -> Any:
        """The tree as it was put: numpy leaves as views of `root`, torch leaves as tensors, copies unless `copy` is
        False. Arguments and errors are those of `torch`."""
        return self._converted(root, (TENSOR,), "an entry with tensors", copy)

    def _converted(self, root: Array, tags: tuple[int, ...], what: str, copy: bool) -> Any:
        """The tree with tensors for the leaves with these tags. `what` needs torch for them."""
        root = self._held(root)
        if self.is_long:
            return _of_long_kept(*self._header(root), self._depth_max)._converted(root, tags, what, copy)
        convert = tensor_copy if copy else tensor_over

        def made(leaf: LeafAt) -> Any:
            viewed = _viewed(leaf, root)
            if leaf.tag not in tags:
                return viewed
            try:
                return convert(needed_torch(what), viewed)
            except UnsupportedLeaf as error:
                path = next(path for path, node in _leaves(self._node, "tree") if node is leaf)
                raise UnsupportedLeaf(f"{path}: {error}") from None

        return _made(self._node, made)

    def _held(self, root: Array) -> Array:
        """An array over `root` that keeps `root` alive. A view of a numpy view keeps only the first array alive."""
        if len(root) < self.end_bytes:
            raise BadTree(f"a payload of {len(root)} bytes has a tree that ends at {self.end_bytes}")
        return np.frombuffer(root.data, np.uint8) if type(root.base) is np.ndarray else root

    def _header(self, root: Array) -> tuple[bytes, int]:
        """The long header in a payload, and its offset."""
        if len(root) < self.end_bytes:
            raise BadTree(f"a payload of {len(root)} bytes has a tree header that ends at {self.end_bytes}")
        return root[self._node.offset : self.end_bytes].tobytes(), self._node.offset


def _of_long(header: bytes, start: int, depth_max: int, rest: Callable[[], object] = no_rest) -> Recipe:
    return Recipe(*read(header, depth_max, start, rest))


_of_long_kept: Final = lru_cache(_LONG_KEPT)(_of_long)


def recipe(header: bytes, *, depth_max: int = DEPTH_MAX, rest: Callable[[], object] = no_rest) -> Recipe:
    """Validates a tree header and returns the Recipe for its trees. `rest`: as for `read`. Raises BadTree: the bytes do
    not describe a tree, or the tree is over a limit; the message names the fault."""
    return Recipe(*read(header, depth_max, rest=rest), depth_max)


def _made(node: Any, make: Callable[[LeafAt], Any]) -> Any:
    kind = type(node)
    if kind is LeafAt:
        return make(node)
    if kind is Container:
        children = [_made(child, make) for child in node.children]
        if node.tag == DICT:
            return dict(zip(node.keys, children, strict=True))
        return children if node.tag == LIST else tuple(children)
    return node.copy() if kind is list else node


def _viewed(leaf: LeafAt, root: Array) -> Any:
    if leaf.tag in (ARRAY, TENSOR):
        return np.ndarray(leaf.shape, leaf.dtype, root, leaf.offset)
    if leaf.tag in (NUMBERS, NUMBERS_TUPLE):
        numbers = np.ndarray(leaf.shape, leaf.dtype, root, leaf.offset).tolist()
        return numbers if leaf.tag == NUMBERS else tuple(numbers)
    text = root[leaf.offset : leaf.offset + leaf.shape[0]].tobytes()
    if leaf.tag == BYTES:
        return text
    try:
        return text.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise BadTree(f"a str of {len(text)} bytes at {leaf.offset} is not UTF-8: {error}") from None


def _leaves(node: Any, path: str) -> Iterator[tuple[str, LeafAt]]:
    if type(node) is LeafAt:
        yield path, node
    elif type(node) is Container:
        for key, child in zip(node.keys, node.children, strict=True):
            yield from _leaves(child, f"{path}[{key!r}]")
