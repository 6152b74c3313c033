"""The format of tree headers, and their validation. Headers come from clients and are not trusted.

A header is a sequence of msgpack scalars, without arrays and maps, so that a reader can split it in one bounded step
before it interprets any of it. The format's number comes first, then one node:

    None, bool, float, short str or bytes      itself
    INT value                                  an int; a bare int would be a tag
    LIST | TUPLE n, n nodes                    LIST_RUN | TUPLE_RUN n, n scalars as they are
    DICT n, n × (key, node)
    ARRAY | TENSOR dtype, ndim, ndim × length  the next leaf
    BYTES | TEXT length                        the next leaf, for long bytes or str
    NUMBERS | NUMBERS_TUPLE dtype, length      the next leaf, for a long list or tuple of ints ("<i8") or floats ("<f8")

A header of more than TREE_BYTES_MAX bytes is itself the payload's first leaf. In its place the payload begins with

    LONG length                                the next leaf is the header

Offsets of leaves are not stored: leaves follow in the header's order, each at the next multiple of 64. So a header
cannot describe overlapping or reordered leaves, and payloads of one shape have identical headers.

How the limits were chosen: the daemon reads the header of each payload before it publishes it, whoever wrote it. Of all
headers within the limits, those of 16,384 arrays with as many dtypes take longest: 70 to 120 ms of a processor. The
copier's thread does that, in turns of clients, and rests every REST_NODES nodes, about a millisecond, so that the event
loop never waits long for the interpreter's lock.

Invariants: for any input bytes, `read` ends within a bounded number of steps with a node or BadTree, and every leaf of
the node lies within [start + len(header), end).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
from msgpack import Unpacker
from msgpack.exceptions import UnpackException

from ...errors import BadTree
from ..ring.layout import RING_BYTES_MAX, TREE_BYTES_MAX, aligned
from .dtypes import DType, dtype_named

FORMAT: Final = 1
LIST, TUPLE, LIST_RUN, TUPLE_RUN, DICT, ARRAY, TENSOR, BYTES, TEXT, INT, NUMBERS, NUMBERS_TUPLE, LONG = range(13)

DEPTH_MAX: Final = 64
NODES_MAX: Final = 16_384
LONG_BYTES_MAX: Final = 1 << 20
SCALARS_MAX: Final = 1 << 17
"""The most scalars of a header, those of runs and shapes included."""
NDIM_MAX: Final = 64
INLINE_BYTES_MAX: Final = 256
INT_MIN: Final = -(1 << 63)
INT_MAX: Final = (1 << 64) - 1
INT_RANGE: Final = "the range from -2**63 to 2**64 - 1"
REST_NODES: Final = 256
_REST_SCALARS: Final = 8192

_LONG_WORDS_BYTES: Final = 7
_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_INT: Final = frozenset({int})
_BYTE: Final[DType] = np.dtype(np.uint8)
_NUMBERS: Final[dict[object, DType]] = {name: np.dtype(name) for name in ("<i8", "<f8")}


class LeafAt(NamedTuple):
    """One leaf at `offset`, in bytes from the payload's start. `tag` is ARRAY, TENSOR, BYTES, TEXT, NUMBERS,
    NUMBERS_TUPLE or, in place of a tree's root, LONG. BYTES, TEXT and LONG leaves have shape (length,) and dtype
    uint8."""

    tag: int
    shape: tuple[int, ...]
    dtype: DType
    offset: int


class Container(NamedTuple):
    """A LIST, TUPLE or DICT of nodes, each with a key, for a list its number. A run is a plain list or tuple."""

    tag: int
    keys: Sequence[Any]
    children: list[Any]


def no_rest() -> None:
    """Without a pause."""


def may_be_long(tree_bytes: int, payload_bytes: int) -> bool:
    """Whether a payload of these sizes may have a long header. If not, `tree_bytes` bounds the time to read it."""
    return tree_bytes <= _LONG_WORDS_BYTES and payload_bytes > TREE_BYTES_MAX


def read(header: bytes, depth_max: int, start: int = 0, rest: Callable[[], object] = no_rest) -> tuple[Any, int]:
    """Parses and validates a header: (root node, end of the last leaf in bytes from the payload's start).

    Args:
        depth_max: limits the nesting of containers.
        start: the offset of the header in its payload. Not 0 for a header that is a leaf.
        rest: called every REST_NODES nodes, for a thread that lets others run meanwhile.

    Raises:
        BadTree: the bytes do not describe a tree, or the tree is over a limit; the message names the fault.
    """
    most = LONG_BYTES_MAX if start else TREE_BYTES_MAX
    if len(header) > most:
        raise BadTree(f"a tree header has {len(header)} bytes, the limit is {most}")
    may_be_long = not start and len(header) <= _LONG_WORDS_BYTES
    reader = _Reader(_scalars(header, rest), start + len(header), depth_max, rest, may_be_long)
    return reader.root(), reader.end


def _scalars(header: bytes, rest: Callable[[], object]) -> list[Any]:
    unpacker = Unpacker(
        max_buffer_size=LONG_BYTES_MAX + 1,
        max_array_len=0,
        max_map_len=0,
        max_ext_len=0,
        ext_hook=_refuse_extension,
        use_list=False,
        unicode_errors="surrogatepass",
    )
    scalars: list[Any] = []
    try:
        unpacker.feed(header)
        while some := list(islice(unpacker, _REST_SCALARS)):
            scalars += some
            if len(scalars) > SCALARS_MAX:
                raise BadTree(f"a tree header has more than {SCALARS_MAX} scalars")
            if len(some) == _REST_SCALARS:
                rest()
        # The unpacker raises no error for a scalar that is cut off at the end. The byte 0xc3 is msgpack's `true`. It is
        # read as `true` only if the header ends with a complete scalar; an incomplete one would absorb it.
        unpacker.feed(b"\xc3")
        whole = [scalar is True for scalar in unpacker] == [True]
    except (ValueError, UnpackException) as error:
        raise BadTree(f"a tree header is not a sequence of msgpack scalars: {type(error).__name__} {error}") from None
    if not whole or not set(map(type, scalars)) <= _SCALARS:
        raise BadTree("a tree header ends within a scalar, or has a value of another type")
    if not scalars or type(scalars[0]) is not int or scalars[0] != FORMAT:
        raise BadTree(f"a tree header has format {scalars[:1]!r:.40}, this tensord reads {FORMAT}")
    return scalars


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"msgpack extension {code}")


class _Reader:
    """One pass over a header's scalars. Each step takes at least one, so the number of steps is bounded."""

    def __init__(
        self, scalars: list[Any], end: int, depth_max: int, rest: Callable[[], object], may_be_long: bool
    ) -> None:
        self._scalars = scalars
        self._at = 1
        self._nodes = 0
        self._rest_at = REST_NODES
        self._rest = rest
        self._depth_max = depth_max
        self._may_be_long = may_be_long
        self._dtypes: dict[Any, DType] = {}
        self.end = end

    def root(self) -> Any:
        node = self._node(0)
        if self._at != len(self._scalars):
            raise BadTree(f"a tree header has scalars after the end of its tree: {len(self._scalars) - self._at}")
        return node

    def _node(self, depth: int) -> Any:
        self._nodes += 1
        if self._nodes >= self._rest_at:
            self._paused()
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
        if tag in (NUMBERS, NUMBERS_TUPLE):
            return self._numbers(tag)
        if tag == LONG and self._may_be_long and self._nodes == 1:
            length = self._count(LONG_BYTES_MAX)
            if length <= TREE_BYTES_MAX:
                raise BadTree(f"a long tree header has {length} bytes, and a payload begins with one of that length")
            return self._leaf(LONG, (length,), _BYTE, length)
        if not LIST <= tag <= DICT:
            raise BadTree(f"a tree header has a node of unknown kind {tag}")
        if depth >= self._depth_max:
            raise BadTree(f"a tree is nested deeper than {self._depth_max}")
        count = self._count(len(self._scalars) - self._at)
        if tag in (LIST_RUN, TUPLE_RUN):
            scalars = self._take(count)
            return scalars if tag == LIST_RUN else tuple(scalars)
        if tag == DICT:
            return self._dict(count, depth)
        return Container(tag, range(count), [self._node(depth + 1) for _ in range(count)])

    def _paused(self) -> None:
        if self._nodes > NODES_MAX:
            raise BadTree(f"a tree has more than {NODES_MAX} nodes")
        self._rest()
        self._rest_at = min(self._nodes + REST_NODES, NODES_MAX + 1)

    def _dict(self, count: int, depth: int) -> Container:
        keys, children = [], []
        for _ in range(count):
            key = self._next()
            if type(key) not in (str, int, bytes):
                raise BadTree(f"a dict in a tree has a key of type {type(key).__name__}")
            keys.append(key)
            children.append(self._node(depth + 1))
        if len(set(keys)) != count:
            raise BadTree("a dict in a tree has a duplicate key")
        return Container(DICT, keys, children)

    def _array(self, tag: int) -> LeafAt:
        name = self._next()
        dtype = self._dtypes.get(name)
        if dtype is None:
            dtype = self._named(name)
        shape = tuple(self._take(self._count(NDIM_MAX)))
        if not set(map(type, shape)) <= _INT or (shape and not 0 <= min(shape) <= max(shape) <= RING_BYTES_MAX):
            wrong = next(each for each in shape if type(each) is not int or not 0 <= each <= RING_BYTES_MAX)
            raise BadTree(f"a leaf has a length of {wrong!r:.40}, not one of 0 to {RING_BYTES_MAX}")
        leaf_bytes = extent = math.prod(shape) * dtype.itemsize
        if not extent:
            # A length of 0 counts as 1, as in numpy, which refuses an array of shape (0, 1 << 60) too.
            extent = math.prod([length or 1 for length in shape]) * dtype.itemsize
        if extent > RING_BYTES_MAX:
            raise BadTree(f"a leaf of shape {shape} has more than {RING_BYTES_MAX} bytes")
        return self._leaf(tag, shape, dtype, leaf_bytes)

    def _named(self, name: Any) -> DType:
        dtype = dtype_named(name) if type(name) is str else None
        if dtype is None:
            raise BadTree(f"a leaf has the unknown dtype {name!r:.40}")
        self._dtypes[name] = dtype
        return dtype

    def _numbers(self, tag: int) -> LeafAt:
        name = self._next()
        dtype = _NUMBERS.get(name)
        if dtype is None:
            raise BadTree(f"a list of numbers has the dtype {name!r:.40}, not one of {', '.join(map(str, _NUMBERS))}")
        length = self._count(RING_BYTES_MAX // dtype.itemsize)
        return self._leaf(tag, (length,), dtype, length * dtype.itemsize)

    def _leaf(self, tag: int, shape: tuple[int, ...], dtype: DType, leaf_bytes: int) -> LeafAt:
        offset = aligned(self.end)
        self.end = offset + leaf_bytes
        if self.end > RING_BYTES_MAX:
            raise BadTree(f"a tree has more than {RING_BYTES_MAX} bytes")
        return LeafAt(tag, shape, dtype, offset)

    def _next(self) -> Any:
        try:
            scalar = self._scalars[self._at]
        except IndexError:
            raise BadTree("a tree header ends within its tree") from None
        self._at += 1
        return scalar

    def _take(self, count: int) -> list[Any]:
        taken = self._scalars[self._at : self._at + count]
        if len(taken) != count:
            raise BadTree("a tree header ends within its tree")
        self._at += count
        return taken

    def _count(self, limit: int | None) -> int:
        value = self._next()
        if type(value) is not int or (limit is not None and not 0 <= value <= limit):
            raise BadTree(f"a tree header has {value!r:.40} where an int of up to {limit or 64} should be")
        return value
