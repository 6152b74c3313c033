"""Checks and converts a caller's sequence: tokens to uint32, and media to their order.

Owns: the checks of both. Does not own: how media are folded into tokens (`shm.payloads.prefix`).
Invariants: a contiguous buffer of uint32 is never copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from ...errors import BadPrefix, UsageError, shown
from ...shm.payloads.dtypes import dtype_named
from ...shm.payloads.prefix import TOKEN_BYTES, Media, Tokens, ordered
from ...shm.payloads.tensors import loaded_torch, tensor_leaf
from ..arguments.checks import check_count

TOKEN_MAX: Final = (1 << 32) - 1
_POSITION_MAX: Final = 1 << 47
_GIVE: Final = "pass a list, an array, a tensor or bytes, best an array of uint32"

GivenTokens = Any
"""An array, a tensor, a buffer or a list of whole numbers."""
GivenMedia = Iterable[Media | tuple[int, int, str, bytes]]


def tokens_of(given: GivenTokens) -> Tokens:
    """Returns the tokens as uint32 of shape (n,), n ≥ 1.

    The result lies over the memory of `given` if that is a contiguous buffer of 32-bit words (numpy, torch on the CPU,
    array, or bytes with 4 for each token). Otherwise it is converted once.

    Raises:
        BadPrefix: no tokens, or a token that is not a whole number from 0 to 2**32 - 1; the message has its position
            and value.
    """
    try:
        array = _array_of(given)
    except (TypeError, ValueError, OverflowError, BufferError, RuntimeError) as error:
        # Other libraries raise any of these for an array that does not hold numbers, or that the host cannot read.
        raise BadPrefix(f"tokens are a {type(given).__name__}: {error}; {_GIVE}") from None
    if array.ndim != 1:
        raise BadPrefix(f"tokens are a {type(given).__name__} of shape {list(array.shape)}, not (n,); {_GIVE}")
    if not len(array):
        raise BadPrefix("tokens are empty; a sequence has at least one")
    if array.dtype == np.uint32:
        return np.ascontiguousarray(array)
    if array.dtype.kind not in "iu" or not array.dtype.isnative:
        raise BadPrefix(f"tokens are of dtype {array.dtype}; pass whole numbers, best as uint32")
    if (array.dtype.kind == "i" and array.min() < 0) or (array.itemsize > TOKEN_BYTES and array.max() > TOKEN_MAX):
        at = int(np.argmax((array < 0) | (array > TOKEN_MAX)))
        raise BadPrefix(f"token {at} is {array[at]}; a token is a whole number from 0 to {TOKEN_MAX}")
    if array.dtype == np.int32:
        return np.ascontiguousarray(array).view(np.uint32)
    return array.astype(np.uint32)


def _array_of(given: GivenTokens) -> np.ndarray[Any, Any]:
    """The tokens as numpy has them."""
    if isinstance(given, bytes | bytearray | memoryview) and memoryview(given).itemsize == 1:
        return np.frombuffer(given, np.uint32)
    torch = loaded_torch()
    if torch is not None and type(given) is torch.Tensor:
        name, array, _ = tensor_leaf(torch, given, lambda: "it")
        return array.view(dtype_named(name))
    return np.asarray(given)


def media_of(given: GivenMedia, tokens: int, *, may_be_cut: bool) -> tuple[Media, ...]:
    """Returns the items ordered by (start, modality), checked against a sequence of `tokens` tokens.

    Raises:
        BadPrefix: an item is invalid or out of its range, ends after the sequence (unless `may_be_cut`), or overlaps
            another item of its modality; the message names the item.
    """
    items: list[Media] = []
    try:
        for start, length, modality, digest in given:
            start = check_count("start", start, _POSITION_MAX)
            length = check_count("length", length, _POSITION_MAX)
            items.append(Media(start, length, modality, memoryview(digest).tobytes()))  # type: ignore[arg-type]
    except (TypeError, ValueError, UsageError) as error:
        raise BadPrefix(f"media are {shown(given):.200}: {error}; pass a list of Media") from None
    return ordered(items, tokens, may_be_cut=may_be_cut) if items else ()
