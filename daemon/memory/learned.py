"""Saves the learned state of the replacement policy in shared memory beside the ring, for the next daemon.

Owns: the file, its format, and when it is saved: at a clean stop, and every SAVE_EVERY_S in case the daemon is killed.
Does not own the content (`Replacement.learned`).

Invariants: the file is replaced atomically, so it is whole. It is used only if its format, ring and policy are those of
the daemon that reads it; otherwise the policy learns from the start.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Final

import msgspec

from ...errors import TensordError
from ...shm.ring import segments
from ..process.logs import logger
from ..replacement import Replacement
from .segments import Segments

_log = logger("tensord")

FORMAT: Final = 2
SAVE_EVERY_S: Final = 300.0
_PART: Final = "learned"
_NEW_PART: Final = "learned.new"


class _Learned(msgspec.Struct, array_like=True, frozen=True):
    format: int
    instance_id: int
    policy: str
    data: list[bytes]


async def keep_saving(memory: Segments, policy: Replacement) -> None:
    while True:
        await asyncio.sleep(SAVE_EVERY_S)
        parts = []
        for part in policy.learned():
            parts.append(part)
            await asyncio.sleep(0)
        try:
            await asyncio.to_thread(save, memory, policy.name, parts)
        except RuntimeError as error:
            _not_saved(error)  # no thread


def save(memory: Segments, policy: str, data: list[bytes]) -> None:
    """Replaces the file. A failure is logged, and the file before stays. May be called in a thread."""
    found = _Learned(FORMAT, memory.superblock.instance_id, policy, data)
    name, new = (segments.segment_name(memory.instance, part) for part in (_PART, _NEW_PART))
    try:
        packed = msgspec.msgpack.encode(found)
        # A daemon that was killed while writing leaves this file.
        segments.remove(new)
        with os.fdopen(segments.create(new, len(packed)), "wb") as file:
            segments.allocate(file.fileno(), 0, len(packed))
            file.write(packed)
        segments.rename(new, name)
    except (TensordError, OSError, MemoryError) as error:
        with suppress(TensordError):
            segments.remove(new)
        _not_saved(error)


def _not_saved(error: Exception) -> None:
    why = str(error) or type(error).__name__
    _log.warning("cannot save the policy's learned state; after a restart it learns from the start", why=why)


def load(memory: Segments, policy: Replacement) -> None:
    data = read(memory, policy.name)
    if data is None:
        _log.info("no learned state of a former daemon's policy; it learns from the start", policy=policy.name)
        return
    try:
        policy.learn(data)
    except ValueError as error:
        text = "the learned state of a former daemon's policy is unusable; it learns from the start"
        _log.warning(text, why=str(error))


def read(memory: Segments, policy: str) -> list[bytes] | None:
    """The saved state for this ring and that policy; None if there is no usable file."""
    try:
        fd = segments.attach(segments.segment_name(memory.instance, _PART), read_only=True)
        with os.fdopen(fd, "rb") as file:
            found = msgspec.msgpack.decode(file.read(), type=_Learned)
    except (TensordError, OSError, ValueError, msgspec.MsgspecError):
        # ValueError: a text in the file is not UTF-8.
        return None
    fits = (found.format, found.instance_id, found.policy) == (FORMAT, memory.superblock.instance_id, policy)
    return found.data if fits else None
