"""What the replacement policy has learned, kept in shared memory beside the ring, for the next daemon of the instance.

Written at a clean stop, and from time to time for a daemon that is killed. Owns: the file, its format, and when it
fits: its format, its ring and its policy are those of the daemon that reads it, and its checksum is right. A file that
does not fit is ignored, and the policy learns anew. Does not own what stands in it: that is the policy's
(`Replacement.learned`).

Invariant: the file is replaced as a whole, so that a daemon finds the last one or the one before.
"""

from __future__ import annotations

import os
from typing import Final

import msgspec
import xxhash

from ..errors import TensordError
from ..shm import segments

FORMAT: Final = 1
SAVE_EVERY_S: Final = 300.0
LEARNED_BYTES_MAX: Final = 1 << 28
"""A longer file is no policy's."""
_PART: Final = "learned"
_NEW_PART: Final = "learned.new"


class _Learned(msgspec.Struct, array_like=True, frozen=True):
    format: int
    instance_id: int
    policy: str
    checksum: int
    data: list[bytes]


def save(instance: str, instance_id: int, policy: str, data: list[bytes]) -> None:
    """Replaces what is kept for the instance; for a thread.

    Args:
        instance_id: of the ring that `data` is about (`Superblock.instance_id`).

    Raises:
        NotEnoughMemory: /dev/shm has no room for it; what was kept before stays.
        SegmentError: /dev/shm does not let us.
    """
    packed = msgspec.msgpack.encode(_Learned(FORMAT, instance_id, policy, _checksum(data), data))
    name, new = (segments.segment_name(instance, part) for part in (_PART, _NEW_PART))
    # Of a daemon that was killed while it wrote.
    segments.remove(new)
    fd = segments.create(new, len(packed))
    try:
        segments.allocate(fd, 0, len(packed))
        written = 0
        while written < len(packed):
            written += os.pwrite(fd, memoryview(packed)[written:], written)
        segments.rename(new, name)
    except BaseException:
        segments.remove(new)
        raise
    finally:
        os.close(fd)


def load(instance: str, instance_id: int, policy: str) -> list[bytes] | None:
    """What was kept for that ring and that policy; None if there is none that fits."""
    name = segments.segment_name(instance, _PART)
    if name not in segments.own(instance):
        return None
    try:
        fd = segments.attach(name, read_only=True)
        with os.fdopen(fd, "rb") as file:
            packed = file.read(LEARNED_BYTES_MAX + 1)
        found = msgspec.msgpack.decode(packed, type=_Learned)
    except (TensordError, OSError, ValueError, msgspec.MsgspecError):
        # ValueError: a text that is not UTF-8.
        return None
    whole = len(packed) <= LEARNED_BYTES_MAX and found.checksum == _checksum(found.data)
    fits = (found.format, found.instance_id, found.policy) == (FORMAT, instance_id, policy)
    return found.data if whole and fits else None


def _checksum(parts: list[bytes]) -> int:
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(len(part).to_bytes(8, "little"))
        checksum.update(part)
    return checksum.intdigest()
