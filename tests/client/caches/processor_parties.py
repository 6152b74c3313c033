"""A frontend as a process of its own. Without torch, which takes a process seconds to import."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

import tensord

from ...daemon_process import PATIENCE_S
from ...processes import Stage

NAMESPACE: Final = tensord.Namespace(model="m", revision="r", dtype="float32", processor="p")


def made_of(number: int) -> dict[str, Any]:
    """What a processor makes of picture `number`."""
    return {"pixel_values": np.full(1 << 14, number, np.float32)}


def a_frontend(stage: Stage, socket: Path, hashes: list[str]) -> None:
    """Tells what it sends for its pictures, and holds it until it is killed."""
    cache = tensord.ProcessorCache(tensord.Client(socket), NAMESPACE, put_wait_s=PATIENCE_S)
    stage.tell(cache.get_and_update([made_of(number) for number in range(len(hashes))], hashes))
    stage.hear()
