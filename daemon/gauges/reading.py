"""The interface of gauge sources: readings, failures, and the protocol `Source`.

Invariant: an impossible reading cannot be constructed. Some bindings return -1 in place of an error; as a signed or an
unsigned number it is a failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from ...ipc.messages.schema import SIZE_BYTES_MAX


class GaugeFailed(Exception):
    """A source, or one of its gauges, cannot be read now. It is logged and shown; it never leaves this package."""


class GaugeAbsent(GaugeFailed):
    """A source does not exist on this machine: no library, no driver, no such hardware."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of one gauge. `used_bytes` may exceed `total_bytes` if a driver reports it so. `began_at`: the time
    at which the reading began, if that was before the sample. `shown`: further fields for status. Raises GaugeFailed if
    used_bytes is below 0, total_bytes below 1, or either above SIZE_BYTES_MAX."""

    used_bytes: int
    total_bytes: int
    shown: Mapping[str, Any] = field(default_factory=dict)
    began_at: float | None = None

    def __post_init__(self) -> None:
        # -1 as an unsigned number is above SIZE_BYTES_MAX, the most that a message can have.
        if not (0 <= self.used_bytes <= SIZE_BYTES_MAX and 0 < self.total_bytes <= SIZE_BYTES_MAX):
            raise GaugeFailed(f"impossible reading: {self.used_bytes} of {self.total_bytes} bytes used")


Result = dict[str, Reading | GaugeFailed]
"""By gauge: its reading, or why it cannot be read."""


class SourceAnswer(NamedTuple):
    """The outcome of one reading of a source, which began at `began_at`: its gauges, or why it could read none."""

    result: Result | GaugeFailed
    began_at: float


class Source(Protocol):
    """A source of gauges. All methods may block, even for ever. One thread of its own calls them (`gauges`)."""

    @property
    def name(self) -> str: ...

    def read(self, now: float) -> Result:
        """Reads all gauges. One that is there and cannot be read is in the result as a failure.

        Raises:
            GaugeAbsent: the source does not exist on this machine.
            GaugeFailed: no gauge can be read now.
        """
        ...

    def close(self) -> None:
        """Releases the source's resources, if there are any. The source may be read again afterwards."""
        return


class DeviceSource(Source, Protocol):
    """A source of the devices' gauges, for which `auto` stands. It is there by its module in `sources`.

    `preference`: of the sources that can read a device, the one with the lowest number is read. `root`: the folder that
    has /sys and /dev.
    """

    name: ClassVar[str]
    preference: ClassVar[int]

    def __init__(self, root: Path) -> None: ...


def text_of(file: Path) -> str:
    """The text of a file of the kernel. Raises GaugeFailed."""
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise GaugeFailed(str(error)) from error


def number_in(file: Path) -> int:
    """The number that a file of the kernel has. Raises GaugeFailed."""
    text = text_of(file).strip()
    if not text.isdecimal():
        raise GaugeFailed(f"{file} has {text[:64]!r}; wanted: a number of bytes")
    return int(text)


def failure_of(error: BaseException) -> GaugeFailed:
    """Any exception as a failure, in one line and with its type: many exceptions of bindings have no useful text."""
    if isinstance(error, GaugeFailed):
        return error
    return GaugeFailed(" ".join(f"{type(error).__name__}: {error}".split()))


def pci_name(domain: int, bus: int, device: int, function: int = 0) -> str:
    """A device's name such as "0000:65:00.0", in the form that the kernel and clients use."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"
