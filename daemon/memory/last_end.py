"""How the daemon before this one ended, for `tensorctl doctor` and the log.

Owns: a record in the last bytes of the index's first page. A daemon writes "running" there when it begins, and
"stopped" or "failed" when it ends. A daemon that finds "running" follows one that was killed. Does not own: the
superblock, which begins that page.

Invariants: the record changes nothing that clients or a recovery read. A record of another epoch than the one before is
ignored: a release without records ran in between, or the page is damaged.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Any, Final, Self

from ...shm.ring import segments
from ...shm.ring.layout import PAGE_BYTES

WHY_BYTES_MAX: Final = 400
_RECORD: Final = struct.Struct(f"<QQ{WHY_BYTES_MAX}s")
_AT: Final = PAGE_BYTES - _RECORD.size
_ENDS: Final = ("unknown", "running", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class LastEnd:
    """The record of this daemon, and the end of the one before.

    `end` of the daemon before: "stopped", "failed", "killed", "unknown", or "none" for new memory. `why`: the reason of
    a failure.
    """

    fd: int
    epoch: int
    end: str
    why: str

    @classmethod
    def begin(cls, instance: str, epoch: int, *, recovered: bool) -> Self:
        """Reads how the daemon before ended, and records that this one runs.

        Raises:
            SegmentError: the index cannot be opened.
        """
        fd = segments.attach(segments.segment_name(instance, "index"))
        end, why = _read(fd, epoch - 1) if recovered else ("none", "")
        began = cls(fd, epoch, end, why)
        began._write("running", "")
        return began

    def finish(self, failure: BaseException | None) -> None:
        """Records that this daemon stops, or why it failed."""
        self._write("stopped" if failure is None else "failed", "" if failure is None else _told(failure))
        os.close(self.fd)

    def document(self) -> dict[str, Any]:
        """The part of the status document about the daemon before."""
        return {"end": self.end, "why": self.why, "epoch": self.epoch - 1}

    def _write(self, end: str, why: str) -> None:
        cut = why.encode("utf-8", "replace")[:WHY_BYTES_MAX]
        os.pwrite(self.fd, _RECORD.pack(self.epoch, _ENDS.index(end), cut), _AT)


def _read(fd: int, epoch: int) -> tuple[str, str]:
    recorded, end, why = _RECORD.unpack(os.pread(fd, _RECORD.size, _AT))
    if recorded != epoch or not 0 < end < len(_ENDS):
        return "unknown", ""
    if _ENDS[end] == "running":
        return "killed", ""
    return _ENDS[end], why.rstrip(b"\0").decode("utf-8", "replace")


def _told(failure: BaseException) -> str:
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return f"{type(failure).__name__}: {failure}"
