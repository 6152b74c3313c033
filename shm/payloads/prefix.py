"""The record at the start of a cached block's payload: the block's place in its sequence. Queries have the same form.

A sequence is cut into blocks of a power-of-two number of tokens, so that sequences share blocks. Snapshots exist beside
blocks; a snapshot continues a sequence at one position only. Blocks and snapshots are entries. The first leaf of their
payload, at `aligned(tree_bytes)`, is the record: the sequence it continues, its range of tokens, and its media. So the
daemon can rebuild the tree of blocks from the ring alone, also after a restart.

    header 96 bytes │ media, 64 bytes each │ tokens, uint32, media folded in

Folding makes two sequences differ where their media differ: the tokens of a media item are XORed with words of the
item's identity. Where both sequences have the same item, folded tokens are equal exactly if the tokens are. Where they
have different items, folded tokens are equal only by coincidence, with 32 bits a token; a comparison must also compare
the items (`agreed`).

Invariants: equal records of a namespace and generation have equal keys. A record is read back exactly as packed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from ...errors import BadPrefix
from ..index.keys import make_key
from ..ring.layout import NO_KEY

Modality = Literal["image", "audio", "video"]
MODALITIES: Final[tuple[Modality, ...]] = ("image", "audio", "video")
HASH_BYTES: Final = 32
SCOPE_BYTES: Final = 16
LAYOUT_BYTES: Final = 16
TOKEN_BYTES: Final = 4
BLOCK_TOKENS_MIN: Final = 16
BLOCK_TOKENS_MAX: Final = 4096
MEDIA_MAX: Final = 8192
"""Limit on media items in one sequence."""

_MAGIC: Final = 0x58465054  # "TPFX"
_HEADER: Final = struct.Struct("@IBBBx16s16sQII32s8x")
_MEDIA: Final = struct.Struct("@QQB7x32s8x")
_SNAPSHOT, _EXACT, _ROOT = 1, 2, 4
HEADER_BYTES: Final = _HEADER.size
MEDIA_BYTES: Final = _MEDIA.size
RECORD_BYTES_MAX: Final = HEADER_BYTES + MEDIA_MAX * MEDIA_BYTES + BLOCK_TOKENS_MAX * TOKEN_BYTES
"""Limit for a stored record. A query's record may be longer, since it has all tokens of its sequence."""

Tokens = np.ndarray[Any, np.dtype[np.uint32]]


class Media(NamedTuple):
    """An image, audio or video item in a sequence: the `length` tokens from token `start` on stand for it.

    `hash`: 32 bytes that identify the item's content (SHA-256).

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
        """The position after the item's last token: `start + length`."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class PrefixRecord:
    """A record: a block of `count` tokens, a snapshot (without tokens), or a query (a whole sequence).

    Args:
        scope: 16 bytes that identify the namespace at its generation. Only records of one scope are compared.
        layout: 16 bytes that identify the model's layers and the block size. Sequences of one layout share blocks.
        exact: whether sequences of the layout can be continued only at a snapshot.
        start: the position of the first token in the sequence; of a snapshot, its own.
        parent: the parent's key; None at the beginning of a sequence. A snapshot's parent is the block in which, or at
            whose end, its position lies.
        media: the items that begin in this block, in the order of (start, modality), with positions in the sequence. A
            query has all items of its sequence.
        block_tokens: the number of tokens of a full block.
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
        """Offset of the tokens, in bytes from the record's beginning."""
        return HEADER_BYTES + MEDIA_BYTES * len(self.media)

    @property
    def record_bytes(self) -> int:
        return self.text_at + TOKEN_BYTES * self.count

    def pack(self, folded: Tokens) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The record, (record_bytes,) uint8. `folded` has its folded tokens, (count,) uint32."""
        packed = np.empty(self.record_bytes, np.uint8)
        self.pack_into(packed, folded)
        return packed

    def pack_into(self, packed: np.ndarray[Any, np.dtype[np.uint8]], folded: Tokens) -> None:
        """Writes the record to `packed`, (record_bytes,) uint8, which must be aligned to 4 bytes."""
        assert folded.dtype == np.uint32 and folded.shape == (self.count,), (folded.dtype, folded.shape)
        assert packed.shape == (self.record_bytes,), packed.shape
        memory = packed.data
        flags = _SNAPSHOT * self.snapshot | _EXACT * self.exact | _ROOT * (self.parent is None)
        form = (_MAGIC, 1, flags, self.block_tokens.bit_length() - 1, self.scope, self.layout)
        sizes = (self.start, self.count, len(self.media))
        _HEADER.pack_into(memory, 0, *form, *sizes, self.parent or NO_KEY)
        memory[HEADER_BYTES : self.text_at] = packed_media(self.media)
        packed[self.text_at :].view(np.uint32)[:] = folded

    @classmethod
    def unpack(cls, packed: bytes | bytearray | memoryview) -> PrefixRecord:
        """Reads a record. Its tokens are at `text_at` and are not copied. Raises BadPrefix, which names the field."""
        size = len(packed)
        if size < HEADER_BYTES:
            raise BadPrefix(f"a record of {size} bytes, less than its header of {HEADER_BYTES}")
        magic, version, flags, shift, scope, layout, start, count, items, parent = _HEADER.unpack_from(packed)
        if magic != _MAGIC or version != 1:
            raise BadPrefix(f"a record begins with {magic:#x} of version {version}, not with {_MAGIC:#x} of 1")
        if size != HEADER_BYTES + items * MEDIA_BYTES + count * TOKEN_BYTES:
            raise BadPrefix(f"a record of {size} bytes says that it has {items} media and {count} tokens")
        if start + count >= 1 << 48:
            raise BadPrefix(f"a record begins at token {start} with {count} tokens, past the limit of 2 ** 48")
        if items > MEDIA_MAX:
            raise BadPrefix(f"a record of {items} media; {MEDIA_MAX} are possible")
        media = unpacked_media(memoryview(packed)[HEADER_BYTES : HEADER_BYTES + MEDIA_BYTES * items])
        exact, snapshot, root = (bool(flags & flag) for flag in (_EXACT, _SNAPSHOT, _ROOT))
        before = None if root else parent
        return cls(scope, layout, exact, snapshot, start, count, before, media, 1 << min(shift, 40))


def block_key(tag: bytes, packed: bytes | bytearray | memoryview, generation: int = 0) -> bytes:
    """The key of a block in the namespace `tag` (8 bytes) at `generation`: the digest is SHA-256 over the record. That
    includes the parent's key, so blocks have one key exactly if they continue one sequence in the same way."""
    return make_key(tag, hashlib.sha256(packed).digest(), generation)


def packed_media(media: Iterable[Media]) -> bytes:
    """Media items in the form of a record, MEDIA_BYTES each."""
    number = MODALITIES.index
    return b"".join([_MEDIA.pack(start, length, number(modality), digest) for start, length, modality, digest in media])


def unpacked_media(packed: bytes | bytearray | memoryview) -> tuple[Media, ...]:
    """Reads packed media items. Raises BadPrefix if one has an unknown modality."""
    found = []
    for start, length, modality, digest in _MEDIA.iter_unpack(packed):
        if modality >= len(MODALITIES):
            raise BadPrefix(f"a record has an item of modality {modality}; there are {len(MODALITIES)}")
        found.append(Media(start, length, MODALITIES[modality], digest))
    return tuple(found)


def ordered(media: Iterable[Media], tokens: int, *, may_be_cut: bool) -> tuple[Media, ...]:
    """`media` of a sequence of `tokens` tokens, sorted by (start, modality), after validation. `may_be_cut`: whether an
    item may end past the sequence's end, as when a prefill stopped within the item. Raises BadPrefix: an item is out of
    range, ends past the sequence's end, or overlaps another of its modality; the message names the item. Or there are
    more than MEDIA_MAX items."""
    items = sorted((Media(*item) for item in media), key=lambda item: (item.start, str(item.modality)))
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
    """`tokens`, (n,) uint32, with the identities of `media` XORed in. A copy if there are any items, else `tokens`
    itself."""
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
    """The first position at which two ordered lists of media differ: the start of the first item that only one of them
    has. `up_to` if they do not differ before it."""
    for mine, other in zip_longest(ours, theirs):
        if mine != other:
            return min([up_to, *(item.start for item in (mine, other) if item is not None)])
    return up_to


def uncut(position: int, media: Sequence[Media]) -> int:
    """`position`, or if it lies within a media item, the greatest smaller position that lies within none."""
    while True:
        cut = min((item.start for item in media if item.start < position < item.end), default=position)
        if cut == position:
            return position
        position = cut


def kept(position: int, media: Sequence[Media]) -> dict[Modality, int]:
    """Number of items by modality that end after `position`, and so still have to be encoded."""
    return {kind: sum(item.modality == kind and item.end > position for item in media) for kind in MODALITIES}
