"""Trees into payloads, for puts: one flat walk over the tree, then one copy of each leaf. recipe.py is the inverse.

    payload = tree header, then each leaf at the next multiple of 64; a long header is the first leaf

Nothing is pickled.

Invariants: equal trees have equal payloads, byte for byte. `write` writes each byte of the payload, padding as zeros,
except for leaves that their owner writes, and no byte outside of it, whatever happens to the caller's arrays meanwhile.

Arrays are the common leaf, so a container's loop treats them in place, without a call: a tree of 40 arrays takes 25 µs
and 90 calls. With msgpack's own walker, which calls back for each array, it took 59 µs and 324 calls, and that walker
sees neither the types of keys, nor how deep it is, nor that a bytearray is no bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from msgpack import Packer

from ...errors import ObjectTooLarge, UnsupportedLeaf, shown
from ..ring.layout import RING_BYTES_MAX, TREE_BYTES_MAX
from . import header as form
from .dtypes import COPIED_AS, DType, name_of
from .specs import Place, Spec, check_key, described, spec_of, where
from .tensors import Watch, loaded_torch, tensor_leaf

Array = np.ndarray[Any, Any]
ndarray = np.ndarray

Source: TypeAlias = tuple[int, Sequence[int], DType, Array | None, Watch | None]
"""A leaf: its bytes, the shape and dtype of its copy, where it is copied from, and the watch over that memory. Without
an array, its owner writes the leaf."""

_ZEROS: Final = [bytes(gap) for gap in range(64)]

NUMBERS_MIN: Final = 64
"""A list of that many ints, or floats, or more is one leaf. A shorter one is a part of the header."""
_SINGLES_MAX: Final = 4096
_PACKER_TOKENS_MAX: Final = 8192
_SIMPLE: Final = frozenset({type(None), bool, float})
_SCALARS: Final = _SIMPLE | {int, str, bytes}
_NUMBERS: Final[dict[frozenset[type], DType]] = {frozenset({int}): np.dtype("<i8"), frozenset({float}): np.dtype("<f8")}

_packer: Final = Packer(use_bin_type=True, unicode_errors="surrogatepass")
"""For headers of usual length. It runs no Python code, so threads use it one after the other."""
_dtypes: Final[dict[DType, tuple[str, DType | None]]] = {}
"""Of plain dtypes: the name, and the dtype as which it is copied if that is another one. Sized dtypes are not kept: two
equal ones may have different names, and the header must not depend on which of them came first."""
_singles: Final[dict[tuple[DType, tuple[int, ...]], tuple[bytes, int, DType, DType | None]]] = {}
"""The headers of trees that are one array: header, payload bytes, dtype of the copy, and the same if the array is
viewed as it."""


class Packed(NamedTuple):
    """A payload before it is written: `header`, then `sources` in order, which are read then."""

    header: bytes
    sources: Sequence[Source]
    payload_bytes: int

    def write(self, memory: memoryview, start: int) -> None:
        """Writes a payload to byte `start`, a multiple of 64, of writable memory. Copies larger leaves without the GIL.
        Raises UnsupportedLeaf or ValueError if the process freed the memory of a leaf, or changed its shape, meanwhile.
        """
        header, sources, _ = self
        at = start + len(header)
        memory[start:at] = header
        for size_bytes, shape, dtype, array, watch in sources:
            if gap := -at & 63:
                memory[at : at + gap] = _ZEROS[gap]
                at += gap
            if watch is None:
                if array is not None:
                    ndarray(shape, dtype, memory, at)[...] = array
            else:
                pointer, address, gone = watch
                if pointer() != address:
                    gone()
                ndarray(shape, dtype, memory, at)[...] = array
                # Another thread may have freed the memory during the copy. Then what was copied is not of the leaf.
                if pointer() != address:
                    gone()
            at += size_bytes


class Whole:
    """A payload that stands somewhere as a whole: `memory`, (payload_bytes,) uint8, begins with its header."""

    __slots__ = ("_memory", "header", "payload_bytes")

    def __init__(self, header: bytes, memory: Array) -> None:
        self.header, self.payload_bytes, self._memory = header, len(memory), memory

    def write(self, memory: memoryview, start: int) -> None:
        """As `Packed.write`."""
        ndarray((self.payload_bytes,), np.uint8, memory, start)[...] = self._memory


def pack(tree: Any, depth_max: int = form.DEPTH_MAX) -> Packed:
    """The payload of a tree of dict, list, tuple, str, bytes, int (64 bits), float, bool, None, numpy arrays and
    scalars, and torch tensors (detached, and copied from their device now). A long list of ints or of floats costs
    what an array of them costs.

    Raises:
        UnsupportedLeaf: the tree has a value of another type or dtype; the message names its place and a remedy.
        ObjectTooLarge: the tree has too many nodes, too long a header, or too many bytes.
    """
    single = type(tree) is ndarray
    if single:
        try:
            header, payload_bytes, dtype, moved_as = _singles[tree.dtype, tree.shape]
        except KeyError:
            pass
        else:
            source = tree if moved_as is None else tree.view(moved_as)
            return Packed(header, ((tree.nbytes, tree.shape, dtype, source, None),), payload_bytes)
    packed = _Packing(depth_max).packed(tree)
    if single and tree.dtype in _dtypes:
        if len(_singles) >= _SINGLES_MAX:
            _singles.clear()
        dtype = packed.sources[0][2]
        moved_as = None if dtype is tree.dtype else _dtypes[tree.dtype][1]
        _singles[tree.dtype, tree.shape] = packed.header, packed.payload_bytes, dtype, moved_as
    return packed


def pack_spec(tree: Any, depth_max: int = form.DEPTH_MAX) -> Packed:
    """As `pack`, of a tree that may have `Spec` in place of arrays. Their owner fills `recipe(header).view(memory)`."""
    return _Packing(depth_max, takes_specs=True).packed(tree)


class _Packing:
    """One walk over one tree. Collects the header's tokens and the leaves, in the tree's order."""

    __slots__ = ("_depth_max", "_nodes", "_sources", "_takes_specs", "_tokens", "_torch")

    def __init__(self, depth_max: int, *, takes_specs: bool = False) -> None:
        self._depth_max = depth_max
        self._takes_specs = takes_specs
        self._tokens: list[Any] = [form.FORMAT]
        self._sources: list[Source] = []
        self._nodes = 1
        self._torch = loaded_torch()

    def packed(self, tree: Any) -> Packed:
        if type(tree) is ndarray:
            self._array(tree, ())
        else:
            self._node(tree, (), frozenset())
        sources = self._sources
        tokens = self._tokens
        count = len(tokens)
        if count > form.SCALARS_MAX:
            self._check_scalars()
        header = _joined(tokens, count)
        end = len(header)
        if end > form.LONG_BYTES_MAX:
            what = f"the tree's header takes {end} bytes, the limit is {form.LONG_BYTES_MAX}"
            raise ObjectTooLarge(f"{what}; shorten its keys and texts, or put the tree in parts")
        if end > TREE_BYTES_MAX:
            sources.insert(0, _bytes_source(header))
            header = _joined([form.FORMAT, form.LONG, end], 3)
            end = len(header)
        for source in sources:
            end = (end + 63 & -64) + source[0]
        if end > RING_BYTES_MAX:
            raise ObjectTooLarge(f"the tree takes {end} bytes, no ring has more than {RING_BYTES_MAX}")
        return Packed(header, sources, end)

    def _node(self, node: Any, place: Place, above: frozenset[int]) -> None:
        """Any node but a plain array. `above`: the ids of the containers around it."""
        kind = type(node)
        if kind in _SIMPLE:
            self._tokens.append(node)
        elif kind is str or kind is bytes:
            self._text(node)
        elif kind is int:
            if not form.INT_MIN <= node <= form.INT_MAX:
                raise UnsupportedLeaf(f"{where(place)} is an int out of {form.INT_RANGE}; pass it as str or bytes")
            self._tokens += (form.INT, node)
        elif kind is dict or kind is list or kind is tuple:
            self._container(node, place, above)
        elif self._torch is not None and (kind is self._torch.Tensor or isinstance(node, self._torch.Tensor)):
            name, array, watch = tensor_leaf(self._torch, node, partial(where, place))
            dtype, shape, size_bytes = array.dtype, array.shape, array.nbytes
            if not 0 < size_bytes <= RING_BYTES_MAX:
                self._check_extent(shape, dtype, name, place)
            self._tokens += (form.TENSOR, name, array.ndim, *shape)
            self._sources += ((size_bytes, shape, dtype, array, watch),)
        elif isinstance(node, np.generic | np.memmap):
            self._array(np.asarray(node), place)
        elif kind is Spec and self._takes_specs:
            is_tensor, name, dtype, shape = spec_of(node, self._torch, place)
            size_bytes = math.prod(shape) * dtype.itemsize
            if not 0 < size_bytes <= RING_BYTES_MAX:
                self._check_extent(shape, dtype, name, place)
            self._tokens += (form.TENSOR if is_tensor else form.ARRAY, name, len(shape), *shape)
            self._sources += ((size_bytes, shape, dtype, None, None),)
        else:
            raise UnsupportedLeaf(f"{where(place)} is {described(node)}")

    def _container(self, node: Any, place: Place, above: frozenset[int]) -> None:
        own = id(node)
        if own in above:
            what = f"{where(place)} is a {type(node).__name__} that contains itself"
            raise UnsupportedLeaf(f"{what}; pass a tree without cycles")
        if len(above) >= self._depth_max:
            what = f"{where(place)} is nested deeper than the limit of {self._depth_max}"
            raise UnsupportedLeaf(f"{what}; flatten the tree")
        # A copy: another thread may add to the container, and the header states the count before the children.
        is_dict = type(node) is dict
        items: list[Any] = list(node.items()) if is_dict else list(node)
        count = len(items)
        if is_dict:
            self._tokens += (form.DICT, count)
        elif self._run(node, items):
            return
        else:
            self._tokens += (form.LIST if type(node) is list else form.TUPLE, count)
        self._nodes += count
        if self._nodes > form.NODES_MAX:
            what = f"the tree has more than {form.NODES_MAX} nodes (a value that occurs twice counts twice)"
            raise ObjectTooLarge(f"{what}; make one array of many, or put the tree in parts")
        inside = above | {own}
        tokens = self._tokens
        for key, child in items if is_dict else enumerate(items):
            if is_dict:
                if type(key) is not str:
                    check_key(key, place)
                tokens += (key,)
            if type(child) is not ndarray:
                self._node(child, (place, key), inside)
                continue
            # As `_array`. No call stands between the three attributes, so that no other thread changes the array there.
            dtype, shape, size_bytes = child.dtype, child.shape, child.nbytes
            if dtype in _dtypes and 0 < size_bytes <= RING_BYTES_MAX:
                name, moved_as = _dtypes[dtype]
                tokens += (form.ARRAY, name, child.ndim, *shape)
                if moved_as is None:
                    self._sources += ((size_bytes, shape, dtype, child, None),)
                else:
                    self._sources += ((size_bytes, shape, moved_as, child.view(moved_as), None),)
            else:
                self._array(child, (place, key))

    def _array(self, array: Array, place: Place) -> None:
        dtype, shape, size_bytes = array.dtype, array.shape, array.nbytes
        name = name_of(dtype)
        if name is None:
            raise UnsupportedLeaf(
                f"{where(place)} is a numpy array of dtype {dtype}, which no leaf can have; pass numbers, bool, "
                "datetime64, timedelta64 or fixed-width S or U, and fields or objects as a dict or list of those"
            )
        moved_as = COPIED_AS.get(dtype)
        if dtype.kind not in "SUMm":
            _dtypes[dtype] = name, moved_as
        self._check_extent(shape, dtype, name, place)
        self._tokens += (form.ARRAY, name, array.ndim, *shape)
        source = array if moved_as is None else array.view(moved_as)
        self._sources += ((size_bytes, shape, source.dtype, source, None),)

    def _check_extent(self, shape: Sequence[int], dtype: DType, name: str, place: Place) -> None:
        # A length of 0 counts as 1, as in numpy, so that (0, 1 << 60) is refused too.
        if math.prod([length or 1 for length in shape]) * dtype.itemsize > RING_BYTES_MAX:
            what = f"{where(place)} has shape {shown(tuple(shape))} of {name}"
            raise ObjectTooLarge(f"{what}, more than the {RING_BYTES_MAX} bytes of any ring")

    def _run(self, node: list[Any] | tuple[Any, ...], items: list[Any]) -> bool:
        """Makes one leaf of a long list of numbers, or one token sequence of a list of scalars. Whether it did."""
        kinds = frozenset(map(type, items))
        if len(items) >= NUMBERS_MIN and (dtype := _NUMBERS.get(kinds)) is not None:
            try:
                numbers = np.fromiter(items, dtype, len(items))
            except OverflowError:
                pass
            else:
                self._tokens += (form.NUMBERS if type(node) is list else form.NUMBERS_TUPLE, dtype.str, len(items))
                self._sources += ((numbers.nbytes, numbers.shape, dtype, numbers, None),)
                return True
        if not kinds <= _SCALARS or not _is_run(kinds, items):
            return False
        self._tokens += (form.LIST_RUN if type(node) is list else form.TUPLE_RUN, len(items), *items)
        self._check_scalars()
        return True

    def _check_scalars(self) -> None:
        if len(self._tokens) > form.SCALARS_MAX:
            what = f"the tree's header has more than {form.SCALARS_MAX} values, with those of short lists and of shapes"
            raise ObjectTooLarge(f"{what}; turn lists into arrays, or put the tree in parts")

    def _text(self, node: str | bytes) -> None:
        packed = node.encode("utf-8", "surrogatepass") if isinstance(node, str) else node
        if len(packed) <= form.INLINE_BYTES_MAX:
            self._tokens.append(node)
        else:
            self._tokens += (form.TEXT if isinstance(node, str) else form.BYTES, len(packed))
            self._sources.append(_bytes_source(packed))


def _bytes_source(content: bytes) -> Source:
    array = np.frombuffer(content, np.uint8)
    return len(content), array.shape, array.dtype, array, None


def _joined(tokens: list[Any], count: int) -> bytes:
    """`count` tokens in msgpack, one after the other: an array of them without its own first bytes."""
    packer = _packer if count <= _PACKER_TOKENS_MAX else Packer(use_bin_type=True, unicode_errors="surrogatepass")
    packed: bytes = packer.pack(tokens)
    return packed[1 if count < 1 << 4 else 3 if count < 1 << 16 else 5 :]


def _is_run(kinds: frozenset[type], items: Sequence[Any]) -> bool:
    """Whether a header may store these scalars as one run: ints of 64 bits, short str and bytes."""
    if int in kinds and not all(form.INT_MIN <= item <= form.INT_MAX for item in items if type(item) is int):
        return False
    # A character takes up to 4 bytes in UTF-8. Longer text is stored as nodes, whose encoding is measured.
    return not kinds & {str, bytes} or all(
        len(item) <= form.INLINE_BYTES_MAX // 4 for item in items if isinstance(item, str | bytes)
    )
