"""What a source of gauges says: readings, or why there is none.

Owns: the words between sources and whoever asks them. A reading that cannot be true cannot be made: -1, which some
bindings answer in place of an error, is a failure here, as is that number without its sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...ipc.schema import SIZE_BYTES_MAX


class GaugeFailed(Exception):
    """A source, or one gauge of it, cannot be read now. Never leaves the gauges: it is logged and shown."""


class GaugeAbsent(GaugeFailed):
    """There is nothing for this source to read here: no library, no driver, no such hardware."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One gauge, read once. `used_bytes` may be more than `total_bytes` where a driver says so.

    `began_at`: when it was begun, where that was before it was asked for. `shown`: what status shows besides.

    Raises:
        GaugeFailed: fewer than 0 bytes used, fewer than 1 in all, or more than SIZE_BYTES_MAX of either.
    """

    used_bytes: int
    total_bytes: int
    shown: Mapping[str, Any] = field(default_factory=dict)
    began_at: float | None = None

    def __post_init__(self) -> None:
        # -1 as an unsigned number is more than any client could be told.
        if not (0 <= self.used_bytes <= SIZE_BYTES_MAX and 0 < self.total_bytes <= SIZE_BYTES_MAX):
            raise GaugeFailed(f"{self.used_bytes} of {self.total_bytes} bytes used is no reading")


Result = dict[str, Reading | GaugeFailed]
"""By gauge: what it shows, or why it cannot be read."""


class Source(Protocol):
    """Where gauges are read. Everything in it may block; one thread calls it, one call at a time."""

    @property
    def name(self) -> str:
        """What logs and status call it."""
        ...

    def read(self, now: float) -> Result:
        """Every gauge that there is. One that was there and cannot be read any more is a failure, not left out.

        Raises:
            GaugeAbsent: there is nothing to read here.
            GaugeFailed: nothing can be read now.
        """
        ...

    def close(self) -> None:
        """Gives back what it holds; it may be read again nevertheless."""
        ...


def pci_name(domain: int, bus: int, device: int, function: int = 0) -> str:
    """A device's name, "0000:65:00.0", as the kernel writes it and as its tensors' owners name it."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"
