"""Digests of weight files. They cover every byte that may belong to an encoder, and samples of the language model's
tensors.

Owns: how much of a file is read, and in how many threads. Does not own: notes on files read before (remembered).

Invariants
- A tensor belongs to the language model if its name matches LANGUAGE. All other bytes of a file are read: other
  tensors, the header, gaps between tensors, small tensors, and the whole file if its header is not valid for
  safetensors.
- The digest depends on the content alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

from .digest import ALGORITHM, new_digest

SAMPLES: Final = 4
SAMPLE_BYTES: Final = 4 << 10
"""SAMPLES pieces of this size are read of each tensor of the language model, evenly spaced, both ends included."""
SAMPLED_BYTES_MIN: Final = 64 << 10
"""Smaller tensors are read completely."""
LANGUAGE: Final = re.compile(
    r"(((model\.)?language_model\.|(model\.)?text_model\.|llm\.|language\.)(model\.)?|model\.)layers\.\d+\."
    r"(self_attn|mlp|block_sparse_moe)\."
    r"|((model\.)?language_model\.|llm\.|language\.)?lm_head\."
)
"""Names of the language model's tensors: its decoder's layers and its head. Token embeddings are not among them, since
some models insert them into an encoder's outputs."""

FORM: Final = f"1 {ALGORITHM}"
"""Version of the digest. Change it whenever the same content gets another digest."""
_HEADER_BYTES_MAX: Final = 100 << 20
_PIECE_BYTES: Final = 8 << 20
_THREADS_MAX: Final = 8

Range = tuple[int, int]
"""(start, end) of a range of bytes in a file; `end` is not part of it."""


def weight_file_digest(path: Path, *, whole: bool = False) -> str:
    """The digest of a weight file, as text: the algorithm, then hex.

    Args:
        whole: read every byte of the file, those of the language model's tensors too.

    Raises:
        OSError: the file cannot be read, or became shorter while it was read.
    """
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        size_bytes = os.fstat(descriptor).st_size
        skipped = _skipped(descriptor, size_bytes) if path.suffix == ".safetensors" and not whole else []
        pieces = list(_pieces(_rest(skipped, size_bytes)))
        digest = new_digest()
        digest.update(f"{FORM} {size_bytes}\0".encode())
        threads = min(_THREADS_MAX, len(os.sched_getaffinity(0)), len(pieces))
        with ThreadPoolExecutor(max(1, threads), "tensord-fingerprint") as pool:
            for part in pool.map(partial(_piece_digest, descriptor), pieces):
                digest.update(part)
    return f"{ALGORITHM}:{digest.hexdigest()}"


def language_model_tensors(header: dict[str, object]) -> list[Range]:
    """The ranges of the language model's tensors, in the data part of a safetensors file.

    Raises:
        ValueError: the header is not valid, or tensors overlap.
    """
    places: list[tuple[Range, bool]] = []
    for name, about in header.items():
        if name == "__metadata__":
            continue
        offsets = about.get("data_offsets") if isinstance(about, dict) else None
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(at) is int for at in offsets):
            raise ValueError(f"{name} has the data_offsets {offsets!r}, which are not two ints")
        begin, end = offsets
        if not 0 <= begin <= end:
            raise ValueError(f"{name} ends before it begins, at {offsets!r}")
        places.append(((begin, end), LANGUAGE.match(name) is not None))
    places.sort()
    for ((_, end), _), ((begin, _), _) in pairwise(places):
        if begin < end:
            raise ValueError(f"two tensors overlap at {begin}")
    return [place for place, is_language in places if is_language]


def _skipped(descriptor: int, size_bytes: int) -> list[Range]:
    """The ranges of a safetensors file that are not read, in order; none if the header is not valid."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size_bytes < 8 or length > min(_HEADER_BYTES_MAX, size_bytes - 8):
        return []
    try:
        header = json.loads(_read(descriptor, 8, length), object_pairs_hook=_without_duplicates)
        tensors = language_model_tensors(header)
    except (ValueError, AttributeError, RecursionError):
        return []
    data = 8 + length
    if tensors and data + tensors[-1][1] > size_bytes:
        return []
    found = []
    for begin, end in tensors:
        if end - begin < SAMPLED_BYTES_MIN:
            continue
        step = (end - begin - SAMPLE_BYTES) // (SAMPLES - 1)
        starts = [*(begin + step * number for number in range(SAMPLES - 1)), end - SAMPLE_BYTES]
        found += [(data + one + SAMPLE_BYTES, data + next_one) for one, next_one in pairwise(starts)]
    return found


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("the header has a name twice")
    return names


def _rest(skipped: list[Range], size_bytes: int) -> Iterator[Range]:
    at = 0
    for begin, end in skipped:
        yield at, begin
        at = end
    yield at, size_bytes


def _pieces(ranges: Iterator[Range]) -> Iterator[list[Range]]:
    """The ranges in order, in lists of at most _PIECE_BYTES in total. One thread reads each list."""
    piece: list[Range] = []
    room = _PIECE_BYTES
    for begin, end in ranges:
        while begin < end:
            taken = min(room, end - begin)
            piece.append((begin, begin + taken))
            begin += taken
            room -= taken
            if not room:
                yield piece
                piece, room = [], _PIECE_BYTES
    if piece:
        yield piece


def _piece_digest(descriptor: int, piece: list[Range]) -> bytes:
    digest = new_digest()
    for begin, end in piece:
        digest.update(f"{begin} {end}\0".encode())
        digest.update(_read(descriptor, begin, end - begin))
    taken: bytes = digest.digest()
    return taken


def _read(descriptor: int, at: int, count: int) -> bytes:
    """Reads `count` bytes at offset `at`.

    Raises:
        OSError: the file ends before.
    """
    data = os.pread(descriptor, count, at)
    while len(data) < count:
        more = os.pread(descriptor, count - len(data), at + len(data))
        if not more:
            raise OSError(
                f"the file ends at {at + len(data)}, {count - len(data)} bytes too early: is it being written?"
            )
        data += more
    return data
