"""Names LoRA adapters by the content of their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .checkpoints import weights_fingerprint


class Adapters:
    """Fingerprints of LoRA adapters, remembered for as long as their files look the same. For one thread."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, str | None]] = {}

    def name(self, lora_request: Any) -> str | None:
        """The adapter's name and fingerprint; None if its files are not in a folder here.

        Raises:
            OSError: a file of it cannot be read.
        """
        path = Path(lora_request.lora_path)
        if not path.is_dir():
            return None
        looks = sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in path.iterdir() if f.is_file())
        known = self._known.get(str(path))
        if known is None or known[0] != looks:
            known = self._known[str(path)] = (looks, weights_fingerprint(str(path)))
        return None if known[1] is None else f"{lora_request.lora_name}:{known[1]}"
