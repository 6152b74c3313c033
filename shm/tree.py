"""Trees into payloads, for puts. recipe.py is the inverse.

    payload = tree header, then each leaf at the next multiple of 64; a long header is the first leaf

Owns: the types that a tree may hold, and the layout of its payload. Does not own: the header's format (header.py),
writing a payload (payload.py), or the names of dtypes (dtypes.py). Nothing is pickled.

Invariants: equal trees have equal payloads, byte for byte.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from msgpack import Packer

from ..errors import ObjectTooLarge, UnsupportedLeaf, shown
from . import header as form
from .dtypes import COPIED_AS, dtype_named, name_of, name_of_torch
from .layout import RING_BYTES_MAX, TREE_BYTES_MAX, aligned
from .packing import NUMBERS_MIN as NUMBERS_MIN
from .payload import Leaf, Payload
from .places import Spec
from .tensors import loaded_torch, tensor_source

Array = np.ndarray[Any, Any]

__all__ = ["encode", "encode_spec", "Spec", "Payload", "Leaf"]

_SINGLES_MAX: Final = 4096
_SIMPLE: Final = frozenset({type(None), bool, float})
_SCALARS: Final = _SIMPLE | {int, str, bytes}
_NUMBERS: Final[dict[frozenset[type], str]] = {frozenset({int}): "<i8", frozenset({float}): "<f8"}


def encode(tree: Any, *, depth_max: int = form.DEPTH_MAX) -> Payload:
    """The payload of a tree of dict, list, tuple, str, bytes, int (64 bits), float, bool, None, numpy arrays and
    scalars, and torch tensors (detached, and copied from their device now). A long list of ints or of floats costs
    what an array of them costs.

    Raises:
        UnsupportedLeaf: the tree has a value of another type or dtype; the message names its place and a remedy.
        ObjectTooLarge: the tree has too many nodes, too long a header, or too many bytes.
    """
    if type(tree) is np.ndarray:
        known = _singles.get((tree.dtype, tree.shape))
        if known is not None:
            header, offset, leaf_bytes, moved_as = known
            source = tree if moved_as is None else tree.view(moved_as)
            return Payload(header, [Leaf(offset, leaf_bytes, source)], offset + leaf_bytes)
    payload = _Encoder(depth_max, may_reserve=False).payload(tree)
    if type(tree) is np.ndarray and tree.dtype.kind not in "SUMm":
        # Sized dtypes are not cached: two equal ones may have different names, and the header must not depend on which
        # of them came first.
        if len(_singles) >= _SINGLES_MAX:
            _singles.clear()
        leaf = payload.leaves[0]
        _singles[tree.dtype, tree.shape] = (
            payload.header,
            leaf.offset,
            leaf.bytes,
            COPIED_AS.get(tree.dtype),
        )
    return payload


def encode_spec(tree: Any, *, depth_max: int = form.DEPTH_MAX) -> Payload:
    """The payload of a tree with `Spec` leaves, for memory that its owner writes into.

    `write_into` writes everything except those leaves. `recipe(payload.header).view(memory)` then gives arrays to fill.

    Raises: as `encode`.
    """
    return _Encoder(depth_max, may_reserve=True).payload(tree)


_singles: Final[dict[tuple[Any, tuple[int, ...]], tuple[bytes, int, int, Any]]] = {}


class _Encoder:
    """One walk over one tree. Collects header tokens and leaf sources, in the tree's order."""

    def __init__(self, depth_max: int, *, may_reserve: bool) -> None:
        self._depth_max = depth_max
        self._may_reserve = may_reserve
        self._tokens: list[Any] = [form.FORMAT]
        self._sources: list[tuple[int, Array | None, Callable[[], None] | None]] = []
        self._path: list[Any] = []
        self._open: set[int] = set()
        self._nodes = 0
        self._torch = loaded_torch()

    def payload(self, tree: Any) -> Payload:
        self._node(tree)
        self._check_scalars()
        header = _packed(self._tokens)
        if len(header) > form.LONG_BYTES_MAX:
            raise ObjectTooLarge(
                f"the tree's header takes {len(header)} bytes, the limit is {form.LONG_BYTES_MAX}; "
                "shorten its keys and texts, or put the tree in parts"
            )
        if len(header) > TREE_BYTES_MAX:
            self._sources.insert(0, (len(header), np.frombuffer(header, np.uint8), None))
            header = _packed([form.FORMAT, form.LONG, len(header)])
        leaves = []
        end = len(header)
        for leaf_bytes, array, check in self._sources:
            offset = aligned(end)
            leaves.append(Leaf(offset, leaf_bytes, array, check))
            end = offset + leaf_bytes
        if end > RING_BYTES_MAX:
            raise ObjectTooLarge(f"the tree takes {end} bytes, no ring has more than {RING_BYTES_MAX}")
        return Payload(header, leaves, end)

    def _node(self, node: Any) -> None:
        self._nodes += 1
        if self._nodes > form.NODES_MAX:
            raise ObjectTooLarge(
                f"the tree has more than {form.NODES_MAX} nodes (a value that occurs twice counts twice); "
                "make one array of many, or put the tree in parts"
            )
        kind = type(node)
        if kind is np.ndarray:
            self._array(node)
        elif kind in _SIMPLE:
            self._tokens.append(node)
        elif kind is int:
            if not form.INT_MIN <= node <= form.INT_MAX:
                raise UnsupportedLeaf(f"{self._where()} is an int out of {form.INT_RANGE}; pass it as str or bytes")
            self._tokens += (form.INT, node)
        elif kind is str or kind is bytes:
            self._text(node)
        elif kind is list or kind is tuple or kind is dict:
            self._container(node)
        elif self._torch is not None and isinstance(node, self._torch.Tensor):
            name, array, check = tensor_source(self._torch, node, self._where())
            self._leaf(form.TENSOR, name, array.shape, array, check)
        elif isinstance(node, np.generic | np.memmap):
            self._array(np.asarray(node))
        elif kind is Spec and self._may_reserve:
            self._spec(node)
        else:
            raise UnsupportedLeaf(f"{self._where()} is {_described(node)}")

    def _container(self, node: Any) -> None:
        if id(node) in self._open:
            raise UnsupportedLeaf(
                f"{self._where()} is a {type(node).__name__} that contains itself; pass a tree without cycles"
            )
        if len(self._path) >= self._depth_max:
            raise UnsupportedLeaf(
                f"{self._where()} is nested deeper than the limit of {self._depth_max}; flatten the tree"
            )
        # A copy: another thread may add to the container, and the header states the count before the children.
        items: list[Any] = list(node.items()) if type(node) is dict else list(node)
        if type(node) is dict:
            self._tokens += (form.DICT, len(items))
        elif self._numbers(node, items):
            return
        elif _is_run(items):
            self._tokens += (form.LIST_RUN if type(node) is list else form.TUPLE_RUN, len(items), *items)
            self._check_scalars()
            return
        else:
            self._tokens += (form.LIST if type(node) is list else form.TUPLE, len(items))
        self._open.add(id(node))
        for key, child in items if type(node) is dict else enumerate(items):
            if type(node) is dict:
                self._key(key)
            self._path.append(key)
            self._node(child)
            self._path.pop()
        self._open.discard(id(node))

    def _numbers(self, node: list[Any] | tuple[Any, ...], items: list[Any]) -> bool:
        """Makes one leaf of a long list of ints of 64 bits, or of floats. Whether it did."""
        if len(items) < NUMBERS_MIN or (name := _NUMBERS.get(frozenset(map(type, items)))) is None:
            return False
        try:
            array = np.fromiter(items, name, len(items))
        except OverflowError:
            return False
        self._tokens += (form.NUMBERS if type(node) is list else form.NUMBERS_TUPLE, name, len(items))
        self._sources.append((array.nbytes, array, None))
        return True

    def _check_scalars(self) -> None:
        if len(self._tokens) > form.SCALARS_MAX:
            raise ObjectTooLarge(
                f"the tree's header has more than {form.SCALARS_MAX} values, those of short lists and of shapes "
                "included; turn lists into arrays, or put the tree in parts"
            )

    def _key(self, key: Any) -> None:
        if type(key) not in (str, int, bytes) or (type(key) is int and not form.INT_MIN <= key <= form.INT_MAX):
            raise UnsupportedLeaf(
                f"{self._where()} has the key {shown(key, brief=True)} of type {type(key).__name__}; "
                f"keys are str, bytes, or int in {form.INT_RANGE}"
            )
        self._tokens.append(key)

    def _text(self, node: str | bytes) -> None:
        packed = node.encode("utf-8", "surrogatepass") if isinstance(node, str) else node
        if len(packed) <= form.INLINE_BYTES_MAX:
            self._tokens.append(node)
        else:
            self._tokens += (form.TEXT if isinstance(node, str) else form.BYTES, len(packed))
            self._sources.append((len(packed), np.frombuffer(packed, np.uint8), None))

    def _array(self, array: Array) -> None:
        name = name_of(array.dtype)
        if name is None:
            raise UnsupportedLeaf(
                f"{self._where()} is a numpy array of dtype {array.dtype}, which no leaf can have; "
                "pass numbers, bool, datetime64, timedelta64 or fixed-width S or U, and fields or "
                "objects as a dict or list of those"
            )
        moved_as = COPIED_AS.get(array.dtype)
        self._leaf(form.ARRAY, name, array.shape, array if moved_as is None else array.view(moved_as))

    def _spec(self, spec: Spec) -> None:
        torch = self._torch
        is_torch = torch is not None and isinstance(spec.dtype, torch.dtype)
        name = None
        if is_torch and torch is not None:
            name = name_of_torch(torch, spec.dtype)
        elif isinstance(spec.dtype, str) and dtype_named(spec.dtype) is not None:
            name = spec.dtype
        elif spec.dtype is not None:
            try:
                name = name_of(np.dtype(spec.dtype))
            except Exception:
                # Whatever the object raises that numpy asks for its dtype, or for its text.
                pass
        if name is None:
            raise UnsupportedLeaf(f"{self._where()} is a Spec of dtype {shown(spec.dtype)}, which no leaf can have")
        try:
            shape = tuple(operator.index(length) for length in spec.shape)
        except TypeError:
            shape = (-1,)
        if len(shape) > form.NDIM_MAX or any(length < 0 for length in shape):
            raise UnsupportedLeaf(
                f"{self._where()} is a Spec of shape {shown(spec.shape, brief=True)}; "
                f"a shape is up to {form.NDIM_MAX} ints, none negative"
            )
        self._leaf(form.TENSOR if is_torch else form.ARRAY, name, shape, None)

    def _leaf(
        self,
        tag: int,
        name: str,
        shape: Sequence[int],
        array: Array | None,
        check: Callable[[], None] | None = None,
    ) -> None:
        dtype = dtype_named(name)
        assert dtype is not None, name
        # A length of 0 counts as 1, as in numpy, so that (0, 1 << 60) is refused too.
        if math.prod(length or 1 for length in shape) * dtype.itemsize > RING_BYTES_MAX:
            raise ObjectTooLarge(
                f"{self._where()} has shape {shown(tuple(shape))} of {name}, more than the {RING_BYTES_MAX} bytes of "
                "any ring"
            )
        self._tokens += (tag, name, len(shape), *shape)
        self._sources.append((math.prod(shape) * dtype.itemsize, array, check))

    def _where(self) -> str:
        return "tree" + "".join(f"[{shown(key, brief=True)}]" for key in self._path)


def _packed(tokens: list[Any]) -> bytes:
    packer = Packer(autoreset=False, use_bin_type=True, unicode_errors="surrogatepass")
    for token in tokens:
        packer.pack(token)
    packed: bytes = packer.bytes()
    return packed


def _is_run(items: Sequence[Any]) -> bool:
    """Whether a header may store these values as one run: scalars, ints of 64 bits, short str and bytes."""
    kinds = set(map(type, items))
    if not kinds <= _SCALARS:
        return False
    if int in kinds and not all(form.INT_MIN <= item <= form.INT_MAX for item in items if type(item) is int):
        return False
    # A character takes up to 4 bytes in UTF-8. Longer text is stored as nodes, whose encoding is measured.
    return not kinds & {str, bytes} or all(
        len(item) <= form.INLINE_BYTES_MAX // 4 for item in items if isinstance(item, str | bytes)
    )


def _described(node: Any) -> str:
    kind = type(node)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(node, Spec):
        return "a Spec, which only reserve takes; pass an array"
    for base in (dict, list, tuple, str, bytes, int, float):
        if isinstance(node, base):
            plain = base.__name__
            return f"a {name}, which would come back as a plain {plain}; pass {plain}(x)"
    if isinstance(node, np.ndarray):
        return f"a {name}, which would come back as a plain ndarray; pass its plain arrays"
    if isinstance(node, bytearray | memoryview):
        return f"a {name}; pass bytes(x), or np.frombuffer(x, np.uint8)"
    return (
        f"a {name}; a tree holds dict, list, tuple, str, bytes, int, float, bool, None, numpy "
        "arrays and torch tensors: convert it, for instance with np.asarray(x)"
    )
