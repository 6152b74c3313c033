"""Ends sharing when SGLang changes an engine's weights while it runs.

Owns: the hook, and the storages of this process. Does not own: what a storage does then.

Invariants: a storage learns of a change before the first weight is changed. It learns of attempts that fail, too.
"""

from __future__ import annotations

import sys
import weakref
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .storage import TensordHiCacheStorage

_MANAGER: Final = "sglang.srt.managers.scheduler_components.weight_updater"
_CLASS: Final = "SchedulerWeightUpdaterManager"
_CALLED_BEFORE_EVERY_CHANGE: Final = "_select_runners"
_storages: weakref.WeakSet[TensordHiCacheStorage] = weakref.WeakSet()


def watch(storage: TensordHiCacheStorage) -> bool:
    """Tells the storage when this process changes its weights.

    Returns:
        False if this process has SGLang's scheduler, but not the function to hook. Then changes are not noticed.
    """
    _storages.add(storage)
    module = sys.modules.get(_MANAGER)
    if module is None:
        # No scheduler is in this process, so nothing here changes weights.
        return True
    owner = getattr(module, _CLASS, None)
    original = getattr(owner, _CALLED_BEFORE_EVERY_CHANGE, None)
    if owner is None or original is None:
        return False
    if not hasattr(original, "_tensord_hook"):

        @wraps(original)
        def select_runners(*args: Any, **kwargs: Any) -> Any:
            for each in list(_storages):
                each.weights_change()
            return original(*args, **kwargs)

        select_runners._tensord_hook = True  # type: ignore[attr-defined]
        setattr(owner, _CALLED_BEFORE_EVERY_CHANGE, select_runners)
    return True
