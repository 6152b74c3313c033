"""A source that reads gauges from a file, for tests. Status names this source, so the readings are marked as
made up.

It has a line for each gauge, `host 12GiB 64GiB`.

Replace the file atomically (rename) to change it: a half-written file may be valid and have other values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ....ipc.messages.governance import GAUGE_CHARS_MAX, GAUGES_MAX
from ....ipc.messages.modes import HOST_GAUGE, Tier
from ....ipc.quantities import read_size
from ..reading import GaugeFailed, Reading, Result, Source

_WANTED: Final = "NAME USED TOTAL, such as `host 12GiB 64GiB`"


class FileSource(Source):
    """The lines of one tier in a gauge file: the line `host`, or all other lines. A file without a line for the tier
    is a failure: most likely it is being written."""

    name: Final = "file"

    def __init__(self, path: Path, tier: Tier) -> None:
        self._path = path
        self._tier = tier

    def read(self, now: float) -> Result:
        try:
            lines = self._lines(self._path.read_text("utf-8"))
        except UnicodeDecodeError as error:
            raise GaugeFailed(f"{self._path} is not valid UTF-8: {error.reason} at byte {error.start}") from error
        except OSError as error:
            raise GaugeFailed(str(error)) from error
        mine: Result = {name: line for name, line in lines.items() if (name == HOST_GAUGE) == (self._tier is Tier.HOST)}
        if not mine:
            wanted = f"`{HOST_GAUGE}`" if self._tier is Tier.HOST else "a device"
            raise GaugeFailed(f"{self._path} has no line for {wanted}; wanted: {_WANTED}")
        return mine

    def _lines(self, text: str) -> dict[str, Reading]:
        """The readings by gauge. A text with one bad line has none: it may be half of a file."""
        found: dict[str, Reading] = {}
        for number, line in enumerate(text.split("\n"), 1):
            fields = line.split("#", 1)[0].split()
            if not fields:
                continue
            try:
                name, used, total = fields
                if len(name) > GAUGE_CHARS_MAX or not name.isprintable() or name in found or len(found) == GAUGES_MAX:
                    raise ValueError(f"{name[:GAUGE_CHARS_MAX]!r} is no name, stands there twice, or is one too many")
                found[name] = Reading(read_size(used), read_size(total))
            except (ValueError, OverflowError, GaugeFailed) as error:
                raise GaugeFailed(f"{self._path}, line {number}: {error}; wanted: {_WANTED}") from error
        return found
