"""When a policy's learned state is saved and loaded.

Owns: the times, and the log lines of failures. Does not own: the file (`learned`), nor the content (the policy).
"""

from __future__ import annotations

import asyncio

from ...errors import TensordError
from ..process.logs import logger
from ..replacement import Replacement
from . import learned
from .segments import Segments

_log = logger("tensord")


async def keep_saving(memory: Segments, policy: Replacement) -> None:
    """Saves the policy's learned state every SAVE_EVERY_S, in case this daemon is killed."""
    while True:
        await asyncio.sleep(learned.SAVE_EVERY_S)
        parts = []
        for part in policy.learned():
            parts.append(part)
            await asyncio.sleep(0)
        try:
            await asyncio.to_thread(save, memory, policy.name, parts)
        except RuntimeError as error:
            _not_saved(error)  # no thread


def save(memory: Segments, policy: str, data: list[bytes]) -> None:
    """Saves the learned state. A failure is logged. May be called in a thread."""
    try:
        learned.save(memory.instance, memory.superblock.instance_id, policy, data)
    except (TensordError, OSError, MemoryError) as error:
        _not_saved(error)


def _not_saved(error: Exception) -> None:
    why = str(error) or type(error).__name__
    _log.warning("cannot save the policy's learned state; after a restart it learns from the start", why=why)


def load(memory: Segments, policy: Replacement) -> None:
    """Loads the learned state of a former daemon's policy, if there is a usable one."""
    data = learned.load(memory.instance, memory.superblock.instance_id, policy.name)
    if data is None:
        _log.info("no learned state of a former daemon's policy; it learns from the start", policy=policy.name)
        return
    try:
        policy.learn(data)
    except ValueError as error:
        _log.warning(
            "the learned state of a former daemon's policy is unusable; it learns from the start", why=str(error)
        )
