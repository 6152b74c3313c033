"""The format of tree headers, and their validation. Headers come from clients and are not trusted.

A header is a sequence of msgpack scalars, without arrays and maps, so that a reader can split it in one bounded step
before it interprets any of it. The format's number comes first, then one node:

    None, bool, float, short str or bytes      itself
    INT value                                  an int; a bare int would be a tag
    LIST | TUPLE n, n nodes                    LIST_RUN | TUPLE_RUN n, n scalars as they are
    DICT n, n × (key, node)
    ARRAY | TENSOR dtype, ndim, ndim × length  the next leaf
    BYTES | TEXT length                        the next leaf, for long bytes or str

Offsets of leaves are not stored: leaves follow in the header's order, each at the next multiple of 64. So a header
cannot describe overlapping or reordered leaves, and payloads of one shape have identical headers.

Owns: the format, its limits, and reading it. Does not own: writing it (tree.py), and making trees from it (recipe.py).

Invariants: for any input bytes, `read` ends within a bounded number of steps with a node or BadTree, and every leaf of
the node lies within [len(header), end).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from msgpack import Unpacker
from msgpack.exceptions import UnpackException

from ..errors import BadTree
from .dtypes import DType, dtype_named
from .layout import RING_BYTES_MAX, TREE_BYTES_MAX, aligned

FORMAT: Final = 1
LIST, TUPLE, LIST_RUN, TUPLE_RUN, DICT, ARRAY, TENSOR, BYTES, TEXT, INT = range(10)

DEPTH_MAX: Final = 64
NODES_MAX: Final = 4096  # with LEAVES_MAX, bounds the time to validate any header
LEAVES_MAX: Final = 2048
NDIM_MAX: Final = 64
INLINE_BYTES_MAX: Final = 256
INT_MIN: Final = -(1 << 63)
INT_MAX: Final = (1 << 64) - 1
INT_RANGE: Final = "the range from -2**63 to 2**64 - 1"

_TOKENS: Final = frozenset({type(None), bool, int, float, str, bytes})
_BYTE: Final[DType] = np.dtype(np.uint8)


class LeafAt(NamedTuple):
    """One leaf at `offset`, in bytes from the payload's start: an array, or the bytes of a long str or bytes value.

    `tag` is ARRAY, TENSOR, BYTES or TEXT. BYTES and TEXT leaves have shape (length,) and dtype uint8.
    """

    tag: int
    shape: tuple[int, ...]
    dtype: DType
    offset: int


class ListNode(NamedTuple):
    children: list[Any]


class TupleNode(NamedTuple):
    children: list[Any]


class DictNode(NamedTuple):
    keys: list[Any]
    children: list[Any]


class RunNode(NamedTuple):
    scalars: list[Any]


def read(header: bytes, depth_max: int) -> tuple[Any, int]:
    """Parses and validates a header. `depth_max` limits the nesting of containers.

    Returns:
        (root node, end of the last leaf in bytes from the payload's start).

    Raises:
        BadTree: the bytes do not describe a tree, or the tree is over a limit; the message names the fault.
    """
    if len(header) > TREE_BYTES_MAX:
        raise BadTree(f"a tree header has {len(header)} bytes, the limit is {TREE_BYTES_MAX}")
    reader = _Reader(_tokens(header), len(header), depth_max)
    node = reader.node(0)
    reader.finish()
    return node, reader.end


def _tokens(header: bytes) -> list[Any]:
    unpacker = Unpacker(
        max_buffer_size=TREE_BYTES_MAX + 1,
        max_array_len=0,
        max_map_len=0,
        max_ext_len=0,
        ext_hook=_refuse_extension,
        use_list=False,
        unicode_errors="surrogatepass",
    )
    try:
        unpacker.feed(header)
        tokens = list(unpacker)
        # The unpacker raises no error for a scalar that is cut off at the end. The byte 0xc3 is msgpack's `true`. It is
        # read as `true` only if the header ends with a complete scalar; an incomplete one would absorb it.
        unpacker.feed(b"\xc3")
        whole = [token is True for token in unpacker] == [True]
    except (ValueError, UnpackException) as error:
        raise BadTree(f"a tree header is not a sequence of msgpack scalars: {type(error).__name__} {error}") from None
    if not whole or not set(map(type, tokens)) <= _TOKENS:
        raise BadTree("a tree header ends within a scalar, or has a value of another type")
    if not tokens or type(tokens[0]) is not int or tokens[0] != FORMAT:
        raise BadTree(f"a tree header has format {tokens[:1]!r:.40}, this tensord reads {FORMAT}")
    return tokens


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"msgpack extension {code}")


class _Reader:
    """One pass over a header's tokens. Each step consumes at least one token, so the number of steps is bounded."""

    def __init__(self, tokens: list[Any], header_bytes: int, depth_max: int) -> None:
        self._tokens = tokens
        self._at = 1
        self._nodes = 0
        self._leaves = 0
        self._depth_max = depth_max
        self.end = header_bytes

    def finish(self) -> None:
        if self._at != len(self._tokens):
            raise BadTree(f"a tree header has scalars after the end of its tree: {len(self._tokens) - self._at}")

    def node(self, depth: int) -> Any:
        self._nodes += 1
        if self._nodes > NODES_MAX:
            raise BadTree(f"a tree has more than {NODES_MAX} nodes")
        tag = self._next()
        if type(tag) is not int:
            return tag
        if tag in (ARRAY, TENSOR):
            return self._array(tag)
        if tag == INT:
            return self._count(None)
        if tag in (BYTES, TEXT):
            length = self._count(RING_BYTES_MAX)
            return self._leaf(tag, (length,), _BYTE, length)
        if not LIST <= tag <= DICT:
            raise BadTree(f"a tree header has a node of unknown kind {tag}")
        if depth >= self._depth_max:
            raise BadTree(f"a tree is nested deeper than {self._depth_max}")
        count = self._count(len(self._tokens) - self._at)
        if tag in (LIST_RUN, TUPLE_RUN):
            scalars = self._take(count)
            return RunNode(scalars) if tag == LIST_RUN else tuple(scalars)
        if tag == DICT:
            return self._dict(count, depth)
        children = [self.node(depth + 1) for _ in range(count)]
        return ListNode(children) if tag == LIST else TupleNode(children)

    def _dict(self, count: int, depth: int) -> DictNode:
        keys = []
        children = []
        for _ in range(count):
            key = self._next()
            if type(key) not in (str, int, bytes):
                raise BadTree(f"a dict in a tree has a key of type {type(key).__name__}")
            keys.append(key)
            children.append(self.node(depth + 1))
        if len(set(keys)) != count:
            raise BadTree("a dict in a tree has a duplicate key")
        return DictNode(keys, children)

    def _array(self, tag: int) -> LeafAt:
        name = self._next()
        dtype = dtype_named(name) if type(name) is str else None
        if dtype is None:
            raise BadTree(f"a leaf has the unknown dtype {name!r:.40}")
        shape = tuple(self._take(self._count(NDIM_MAX)))
        # A length of 0 counts as 1, as in numpy, which refuses an array of shape (0, 1 << 60) too.
        extent = dtype.itemsize
        for length in shape:
            if type(length) is not int or not 0 <= length <= RING_BYTES_MAX:
                raise BadTree(f"a leaf has a length of {length!r:.40}, not one of 0 to {RING_BYTES_MAX}")
            extent *= length or 1
            if extent > RING_BYTES_MAX:
                raise BadTree(f"a leaf of shape {shape} has more than {RING_BYTES_MAX} bytes")
        return self._leaf(tag, shape, dtype, 0 if 0 in shape else extent)

    def _leaf(self, tag: int, shape: tuple[int, ...], dtype: DType, leaf_bytes: int) -> LeafAt:
        self._leaves += 1
        if self._leaves > LEAVES_MAX:
            raise BadTree(f"a tree has more than {LEAVES_MAX} leaves")
        offset = aligned(self.end)
        self.end = offset + leaf_bytes
        if self.end > RING_BYTES_MAX:
            raise BadTree(f"a tree has more than {RING_BYTES_MAX} bytes")
        return LeafAt(tag, shape, dtype, offset)

    def _next(self) -> Any:
        if self._at >= len(self._tokens):
            raise BadTree("a tree header ends within its tree")
        token = self._tokens[self._at]
        self._at += 1
        return token

    def _take(self, count: int) -> list[Any]:
        taken = self._tokens[self._at : self._at + count]
        if len(taken) != count:
            raise BadTree("a tree header ends within its tree")
        self._at += count
        return taken

    def _count(self, limit: int | None) -> int:
        value = self._next()
        if type(value) is not int or (limit is not None and not 0 <= value <= limit):
            raise BadTree(f"a tree header has {value!r:.40} where an int of up to {limit or 64} should be")
        return value
