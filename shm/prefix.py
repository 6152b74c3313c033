"""What a piece of a cached sequence says of itself: the record that stands before its payload, and queries alike.

A sequence is cut into blocks of a power-of-two number of tokens, so that sequences share them; beside them stand
snapshots, which continue a sequence at one position only. Each is an entry, and the first leaf of its payload, at
`aligned(tree_bytes)`, is its record: which sequence it continues, from which token to which, with which media. So the
daemon knows the tree of blocks from the ring alone, also after a restart.

    header 96 bytes │ media, 64 bytes each │ tokens, uint32, media folded in

Folding makes two sequences differ where their media do: the words of an item's tokens are mixed with words of its
identity. Where both have the same item, folded tokens agree exactly where tokens do; where they do not, agreement is
a coincidence of 32 bits a token, and whoever compares goes by the items themselves (`agreed`).

Owns: the record's layout, the key that follows from it, folding, and how far two lists of media agree. Does not own
which positions can be rewound to (`ipc.layers`), nor the tree (`daemon.core.prefix_index`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from ..errors import BadPrefix
from .keys import make_key

Modality = Literal["image", "audio", "video"]
MODALITIES: Final[tuple[Modality, ...]] = ("image", "audio", "video")
HASH_BYTES: Final = 32
SCOPE_BYTES: Final = 16
LAYOUT_BYTES: Final = 16
TOKEN_BYTES: Final = 4
BLOCK_TOKENS_MIN: Final = 16
BLOCK_TOKENS_MAX: Final = 4096
MEDIA_MAX: Final = 8192
"""Items of one sequence."""

_MAGIC: Final = 0x58465054  # "TPFX"
_HEADER: Final = struct.Struct("@IBBBx16s16sQII32s8x")
_MEDIA: Final = struct.Struct("@QQB7x32s8x")
_SNAPSHOT, _EXACT, _ROOT = 1, 2, 4
HEADER_BYTES: Final = _HEADER.size
MEDIA_BYTES: Final = _MEDIA.size
RECORD_BYTES_MAX: Final = HEADER_BYTES + MEDIA_MAX * MEDIA_BYTES + BLOCK_TOKENS_MAX * TOKEN_BYTES
"""Of a piece that is stored; a query's has all tokens."""
_NO_KEY: Final = bytes(32)
_NUMBERS: Final[dict[str, int]] = {modality: number for number, modality in enumerate(MODALITIES)}

Tokens = np.ndarray[Any, np.dtype[np.uint32]]


class Media(NamedTuple):
    """An image, an audio or a video in a sequence: `length` tokens from token `start` on stand for it.

    `hash`: 32 bytes of its content (SHA-256).

    Example:
        >>> import hashlib
        >>> picture = tensord.Media(200, 64, "image", hashlib.sha256(b"the bytes of a picture").digest())
        >>> picture.end
        264
    """

    start: int
    length: int
    modality: Modality
    hash: bytes

    @property
    def end(self) -> int:
        """The token after its last one: `start + length`."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of tokens, a snapshot (no tokens), or a query (a whole sequence).

    Args:
        scope: 16 bytes: the namespace at its generation. Pieces of two scopes never meet.
        layout: 16 bytes: which layers a sequence has, and its block size. Sequences of one layout share blocks.
        exact: of a layout that can be continued only where a snapshot stands.
        snapshot: this is one, for position `start`.
        start: where the first token stands in the sequence.
        count: tokens.
        parent: the key of the piece before; None at a sequence's beginning. A snapshot's is the block that its
            position lies in or ends.
        media: those that begin in this piece, in the order of (start, modality), with positions in the sequence. Of a
            query all.
        block_tokens: tokens of a whole block.
    """

    scope: bytes
    layout: bytes
    exact: bool
    snapshot: bool
    start: int
    count: int
    parent: bytes | None
    media: tuple[Media, ...]
    block_tokens: int

    @property
    def text_at(self) -> int:
        """Where its tokens stand, in bytes from the record's beginning."""
        return HEADER_BYTES + MEDIA_BYTES * len(self.media)

    @property
    def record_bytes(self) -> int:
        return self.text_at + TOKEN_BYTES * self.count

    def pack(self, folded: Tokens) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The record, (record_bytes,) uint8; `folded`: its tokens, (count,) uint32."""
        record = np.empty(self.record_bytes, np.uint8)
        self.pack_into(record, folded)
        return record

    def pack_into(self, record: np.ndarray[Any, np.dtype[np.uint8]], folded: Tokens) -> None:
        """Writes the record to `record`, (record_bytes,) uint8, which begins at a multiple of 4."""
        assert folded.dtype == np.uint32 and folded.shape == (self.count,), (folded.dtype, folded.shape)
        assert record.shape == (self.record_bytes,), record.shape
        memory = record.data
        flags = _SNAPSHOT * self.snapshot | _EXACT * self.exact | _ROOT * (self.parent is None)
        _HEADER.pack_into(
            memory,
            0,
            _MAGIC,
            1,
            flags,
            self.block_tokens.bit_length() - 1,
            self.scope,
            self.layout,
            self.start,
            self.count,
            len(self.media),
            self.parent or _NO_KEY,
        )
        memory[HEADER_BYTES : self.text_at] = packed_media(self.media)
        record[self.text_at :].view(np.uint32)[:] = folded

    @classmethod
    def unpack(cls, record: bytes | bytearray | memoryview) -> Piece:
        """Reads it back; the tokens stand at `text_at`.

        Raises:
            BadPrefix: these bytes are no record; the message says where they are none.
        """
        size = len(record)
        if size < HEADER_BYTES:
            raise BadPrefix(f"a record of {size} bytes, less than its header of {HEADER_BYTES}")
        magic, version, flags, shift, scope, layout, start, count, items, parent = _HEADER.unpack_from(record)
        if magic != _MAGIC or version != 1:
            raise BadPrefix(f"a record begins with {magic:#x} of version {version}, not with {_MAGIC:#x} of 1")
        if size != HEADER_BYTES + items * MEDIA_BYTES + count * TOKEN_BYTES:
            raise BadPrefix(f"a record of {size} bytes says that it has {items} media and {count} tokens")
        if start + count >= 1 << 48:
            raise BadPrefix(f"a record begins at token {start} with {count} tokens, behind any sequence's end")
        if items > MEDIA_MAX:
            raise BadPrefix(f"a record of {items} media; {MEDIA_MAX} are possible")
        media = unpacked_media(memoryview(record)[HEADER_BYTES : HEADER_BYTES + MEDIA_BYTES * items])
        return cls(
            scope,
            layout,
            bool(flags & _EXACT),
            bool(flags & _SNAPSHOT),
            start,
            count,
            None if flags & _ROOT else parent,
            media,
            1 << min(shift, 40),
        )


def piece_key(tag: bytes, record: bytes | bytearray | memoryview, generation: int = 0) -> bytes:
    """The key of a piece of the namespace `tag` at `generation`: its digest is SHA-256 over the record.

    The record says everything, the key of the piece before too: two pieces of a namespace have one key exactly if they
    continue the same sequence in the same way.
    """
    return make_key(tag, hashlib.sha256(record).digest(), generation)


def packed_media(media: Iterable[Media]) -> bytes:
    """Media as they stand in a record, MEDIA_BYTES each."""
    pack, number = _MEDIA.pack, _NUMBERS
    return b"".join([pack(start, length, number[modality], digest) for start, length, modality, digest in media])


def unpacked_media(packed: bytes | bytearray | memoryview) -> tuple[Media, ...]:
    """Reads them back.

    Raises:
        BadPrefix: an item is of no modality.
    """
    found = []
    for start, length, modality, digest in _MEDIA.iter_unpack(packed):
        if modality >= len(MODALITIES):
            raise BadPrefix(f"a record has an item of modality {modality}; there are {len(MODALITIES)}")
        found.append(Media(start, length, MODALITIES[modality], digest))
    return tuple(found)


def ordered(media: Iterable[Media], tokens: int, *, may_be_cut: bool) -> tuple[Media, ...]:
    """`media` in the order of (start, modality), checked.

    Args:
        tokens: of the sequence.
        may_be_cut: an item may end past the sequence's end, as where a prefill stopped within it.

    Raises:
        BadPrefix: an item is out of its range, ends past the end, or overlaps another of its modality; it is named.
    """
    items = sorted((Media(*item) for item in media), key=lambda item: (item.start, item.modality))
    if len(items) > MEDIA_MAX:
        raise BadPrefix(f"a sequence with {len(items)} media; {MEDIA_MAX} are possible")
    ends: dict[str, Media] = {}
    for item in items:
        if item.modality not in MODALITIES:
            raise BadPrefix(f"{item}: modality {item.modality!r} is none of {', '.join(MODALITIES)}")
        if len(item.hash) != HASH_BYTES:
            raise BadPrefix(f"{item}: its hash is not {HASH_BYTES} bytes")
        if item.length < 1 or item.start < 0 or item.start >= tokens:
            raise BadPrefix(f"{item}: begins outside of the sequence's {tokens} tokens, or has none")
        if item.end > tokens and not may_be_cut:
            raise BadPrefix(f"{item}: ends at token {item.end}, past the sequence's {tokens}")
        before = ends.get(item.modality)
        if before is not None and before.end > item.start:
            raise BadPrefix(f"{item} overlaps {before}")
        ends[item.modality] = item
    return tuple(items)


def fold(tokens: Tokens, media: Sequence[Media]) -> Tokens:
    """`tokens` with the media's identities mixed in: a copy where there are any, (n,) uint32."""
    if not media:
        return tokens
    folded = tokens.copy()
    for item in media:
        named = struct.pack("@QQB", item.start, item.length, MODALITIES.index(item.modality))
        words = np.frombuffer(hashlib.sha256(named + item.hash).digest(), np.uint32)
        part = folded[item.start : item.end]
        part ^= np.resize(words, len(part))
    return folded


def agreed(ours: Sequence[Media], theirs: Sequence[Media], up_to: int) -> int:
    """The first position, `up_to` at most, from which on two ordered lists of media differ: where the first item
    begins that only one of them has."""
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return min(up_to, mine.start, other.start)
    longer, shorter = (ours, theirs) if len(ours) > len(theirs) else (theirs, ours)
    if len(longer) > len(shorter):
        return min(up_to, longer[len(shorter)].start)
    return up_to


def uncut(position: int, media: Sequence[Media]) -> int:
    """`position`, or where the item begins that it would cut in two."""
    while True:
        cut = min((item.start for item in media if item.start < position < item.end), default=position)
        if cut == position:
            return position
        position = cut


def kept(position: int, media: Sequence[Media]) -> dict[Modality, int]:
    """Per modality how many items are not wholly before `position`, and so still have to be encoded."""
    return {kind: sum(item.modality == kind and item.end > position for item in media) for kind in MODALITIES}
