"""Keys whose value cannot be stored: too large, or in a form that no payload has. Nobody gets a claim on a key that is
remembered here, so no client waits for a value that never comes.

At most KEYS_MAX keys and REASONS_MAX reasons are remembered; the oldest go first.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from ...errors import TensordError
from ...shm.ring.layout import NAMESPACE_TAG_BYTES
from ..process.printable import escaped

REMEMBERED_S: Final = 60.0
KEYS_MAX: Final = 4096
REASONS_MAX: Final = 32


class Unstorable:
    """The keys and the reasons of one daemon. `counts`: counts values by the error's code."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._until: dict[bytes, float] = {}
        self._reasons: dict[tuple[bytes, str], tuple[int, str, float]] = {}
        """By namespace and the error's code: the number of values, and the text and the time of the last one."""

    def __len__(self) -> int:
        return len(self._until)

    def note(self, key: bytes, error: TensordError, now: float) -> None:
        """The value of `key` cannot be stored. The key is remembered from now on."""
        self._until.pop(key, None)
        self._until[key] = now + REMEMBERED_S
        while len(self._until) > KEYS_MAX:
            del self._until[next(iter(self._until))]
        self._counts[error.code] += 1
        name = key[:NAMESPACE_TAG_BYTES], error.code
        count, _, _ = self._reasons.pop(name, (0, "", now))
        self._reasons[name] = count + 1, escaped(str(error)), now
        while len(self._reasons) > REASONS_MAX:
            del self._reasons[next(iter(self._reasons))]

    def stored(self, key: bytes) -> None:
        """The key is stored after all, for example under other limits."""
        self._until.pop(key, None)

    def remembers(self, key: bytes, now: float) -> bool:
        """Whether the key is remembered. Forgets those whose time is over."""
        while self._until and next(iter(self._until.values())) <= now:
            del self._until[next(iter(self._until))]
        return key in self._until

    def rows(self, now: float) -> list[dict[str, Any]]:
        """The reasons, the latest first: `namespace` is hexadecimal, `ago_s` the seconds since the last such value."""
        return [
            {"namespace": tag.hex(), "code": code, "count": count, "text": text, "ago_s": now - at}
            for (tag, code), (count, text, at) in reversed(self._reasons.items())
        ]
