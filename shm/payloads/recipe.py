"""Tree headers back into trees: a reader's views of a payload. packing.py is the inverse; header.py has the format.

    recipe(header) -> Recipe          once per header; the caller caches it by the header's bytes
    Recipe.whole(root) -> Recipe      the same, unless the header is long: then the payload itself has it
    Recipe.view(root) -> tree         for every hit

Owns: making views, tensors and values. Does not own: the validation of headers (header.py), any memory, any root.

Invariants: the trees of a Recipe keep alive the same `root` object that the caller passed. Their views are read-only if
`root` is read-only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, ClassVar, Final

import numpy as np

from ...errors import BadTree, UnsupportedLeaf
from .dtypes import DType
from .header import (
    ARRAY,
    BYTES,
    DEPTH_MAX,
    NUMBERS,
    NUMBERS_TUPLE,
    TENSOR,
    DictNode,
    LeafAt,
    ListNode,
    LongHeader,
    RunNode,
    TupleNode,
    no_rest,
    read,
)
from .tensors import needed_torch, tensor_copy, tensor_over

Array = np.ndarray[Any, Any]
_LONG_KEPT: Final = 4
"""Recipes of long headers that a process keeps. Each takes up to some 10 MB."""


class Recipe:
    """Makes trees from payloads with one header. Immutable, and shared by all payloads with that header.

    `single` is (shape, dtype, offset) if the tree is one array or tensor, else None; `single_is_tensor` says which of
    the two. `end_bytes` is the end of the last leaf: every payload has at least as many bytes. `is_long`: payloads with
    this header may have different trees.
    """

    __slots__ = ("_node", "end_bytes", "single", "single_is_tensor")
    is_long: ClassVar[bool] = False

    def __init__(self, node: Any, end_bytes: int) -> None:
        self._node = node
        self.end_bytes = end_bytes
        self.single: tuple[tuple[int, ...], DType, int] | None = None
        if type(node) is LeafAt and node.tag in (ARRAY, TENSOR):
            self.single = node.shape, node.dtype, node.offset
        self.single_is_tensor = self.single is not None and node.tag == TENSOR

    def whole(self, root: Array, rest: Callable[[], object] = no_rest) -> Recipe:
        """The recipe of the tree of one payload, which is not kept. `root`: as for `view`. `rest`: as for `read`.

        Raises:
            BadTree: the header in the payload does not describe a tree, or the payload is shorter than that header.
        """
        return self

    @property
    def leaves(self) -> list[LeafAt]:
        """All leaves, in ascending order of offsets."""
        return [node for _, node in _leaves(self._node, "tree")]

    def view(self, root: Array) -> Any:
        """The tree with a numpy view of `root` for every array or tensor leaf. Long str and bytes are copied.

        Args:
            root: the payload, (payload_bytes,) uint8. Every view keeps it alive. A read-only root gives read-only
                views.

        Raises:
            BadTree: the payload is shorter than its tree.
        """
        if len(root) < self.end_bytes or type(root.base) is np.ndarray:
            root = self._held(root)
        single = self.single
        if single is not None:
            return np.ndarray(single[0], single[1], root, single[2])
        return _made(self._node, lambda leaf: _viewed(leaf, root))

    def torch(self, root: Array, copy: bool = True) -> Any:
        """The tree with a torch tensor for every array, whether it was put as an array or as a tensor.

        Args:
            root: as for `view`.
            copy: False gives tensors over the payload itself, which keep `root` alive. Torch has no read-only tensors:
                if `root` is read-only memory, an in-place operation on such a tensor ends the process with SIGSEGV.

        Raises:
            BadTree: as `view`.
            UsageError: torch is not installed.
            UnsupportedLeaf: torch lacks the dtype of a leaf, or, without a copy, the leaf has the other byte order.
        """
        torch = needed_torch("lease.torch()")
        root = self._held(root)
        convert = tensor_copy if copy else tensor_over

        def made(leaf: LeafAt) -> Any:
            viewed = _viewed(leaf, root)
            if leaf.tag not in (ARRAY, TENSOR):
                return viewed
            try:
                return convert(torch, viewed)
            except UnsupportedLeaf as error:
                raise UnsupportedLeaf(f"{self._where(leaf)}: {error}") from None

        return _made(self._node, made)

    def value(self, root: Array, copy: bool = True) -> Any:
        """The tree as it was put: numpy leaves as views of `root`, torch leaves as tensors.

        Args:
            root: as for `view`.
            copy: whether to copy tensors. False gives tensors over the payload itself, as for `torch`.

        Raises: as `torch`.
        """
        root = self._held(root)

        def made(leaf: LeafAt) -> Any:
            viewed = _viewed(leaf, root)
            if leaf.tag != TENSOR:
                return viewed
            return (tensor_copy if copy else tensor_over)(needed_torch("an entry with tensors"), viewed)

        return _made(self._node, made)

    def _held(self, root: Array) -> Array:
        """An array over `root` that keeps `root` alive. A view of a numpy view keeps only the first array alive."""
        if len(root) < self.end_bytes:
            raise BadTree(f"a payload of {len(root)} bytes has a tree that ends at {self.end_bytes}")
        return np.frombuffer(root.data, np.uint8) if type(root.base) is np.ndarray else root

    def _where(self, leaf: LeafAt) -> str:
        return next(path for path, node in _leaves(self._node, "tree") if node is leaf)


class LongRecipe(Recipe):
    """Makes trees from payloads whose header is their first leaf. Immutable. `end_bytes` is the end of that header."""

    __slots__ = ("_depth_max",)
    is_long = True
    _node: LongHeader

    def __init__(self, node: LongHeader, end_bytes: int, depth_max: int) -> None:
        super().__init__(node, end_bytes)
        self._depth_max = depth_max

    def whole(self, root: Array, rest: Callable[[], object] = no_rest) -> Recipe:
        return _of_long(self._header(root), self._node.offset, self._depth_max, rest)

    def view(self, root: Array) -> Any:
        return self._known(root).view(root)

    def torch(self, root: Array, copy: bool = True) -> Any:
        return self._known(root).torch(root, copy)

    def value(self, root: Array, copy: bool = True) -> Any:
        return self._known(root).value(root, copy)

    def _known(self, root: Array) -> Recipe:
        return _kept(self._header(root), self._node.offset, self._depth_max)

    def _header(self, root: Array) -> bytes:
        if len(root) < self.end_bytes:
            raise BadTree(f"a payload of {len(root)} bytes has a tree header that ends at {self.end_bytes}")
        return root[self._node.offset : self.end_bytes].tobytes()


def _of_long(header: bytes, start: int, depth_max: int, rest: Callable[[], object] = no_rest) -> Recipe:
    return Recipe(*read(header, depth_max, start, rest))


_kept: Final = lru_cache(_LONG_KEPT)(_of_long)


def recipe(header: bytes, *, depth_max: int = DEPTH_MAX, rest: Callable[[], object] = no_rest) -> Recipe:
    """Validates a tree header and returns the Recipe for its trees. `rest`: as for `read`.

    Raises:
        BadTree: the bytes do not describe a tree, or the tree is over a limit; the message names the fault.
    """
    node, end_bytes = read(header, depth_max, rest=rest)
    return LongRecipe(node, end_bytes, depth_max) if type(node) is LongHeader else Recipe(node, end_bytes)


def _made(node: Any, make: Callable[[LeafAt], Any]) -> Any:
    kind = type(node)
    if kind is LeafAt:
        return make(node)
    if kind is DictNode:
        return dict(zip(node.keys, [_made(child, make) for child in node.children], strict=True))
    if kind is ListNode:
        return [_made(child, make) for child in node.children]
    if kind is TupleNode:
        return tuple([_made(child, make) for child in node.children])
    if kind is RunNode:
        return node.scalars.copy()
    return node


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
    elif type(node) is DictNode:
        for key, child in zip(node.keys, node.children, strict=True):
            yield from _leaves(child, f"{path}[{key!r}]")
    elif type(node) is ListNode or type(node) is TupleNode:
        for position, child in enumerate(node.children):
            yield from _leaves(child, f"{path}[{position}]")
