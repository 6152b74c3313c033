"""Saves the learned state of the replacement policy in shared memory beside the ring, for the next daemon.

The file is written at a clean stop, and every SAVE_EVERY_S in case the daemon is killed.

Owns: the file, its format, and the check whether it is usable. A file is usable if its format, its ring and its policy
are those of the daemon that reads it, and its checksum is right. Any other file is ignored, and the policy learns from
the start. Does not own the content: it belongs to the policy (`Replacement.learned`).

Invariant: the file is replaced atomically, so that a daemon finds the latest version or the one before.
"""

from __future__ import annotations

import os
from typing import Final

import msgspec
import xxhash

from ...errors import TensordError
from ...shm.ring import segments

FORMAT: Final = 1
SAVE_EVERY_S: Final = 300.0
LEARNED_BYTES_MAX: Final = 1 << 28
"""The most bytes of a file. No policy writes a longer one."""
_PART: Final = "learned"
_NEW_PART: Final = "learned.new"


class _Learned(msgspec.Struct, array_like=True, frozen=True):
    format: int
    instance_id: int
    policy: str
    checksum: int
    data: list[bytes]


def save(instance: str, instance_id: int, policy: str, data: list[bytes]) -> None:
    """Replaces the file of the instance. May be called in a thread.

    Args:
        instance_id: the id of the ring that `data` belongs to (`Superblock.instance_id`).

    Raises:
        NotEnoughMemory: /dev/shm has no room for the file. The file before stays.
        SegmentError: /dev/shm refused the file.
    """
    packed = msgspec.msgpack.encode(_Learned(FORMAT, instance_id, policy, _checksum(data), data))
    name, new = (segments.segment_name(instance, part) for part in (_PART, _NEW_PART))
    # A daemon that was killed while writing leaves this file.
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
    """The saved state for that ring and that policy; None if there is no usable file."""
    name = segments.segment_name(instance, _PART)
    if name not in segments.own(instance):
        return None
    try:
        fd = segments.attach(name, read_only=True)
        with os.fdopen(fd, "rb") as file:
            packed = file.read(LEARNED_BYTES_MAX + 1)
        found = msgspec.msgpack.decode(packed, type=_Learned)
    except (TensordError, OSError, ValueError, msgspec.MsgspecError):
        # ValueError: a text in the file is not UTF-8.
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
