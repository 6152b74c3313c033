"""The bound on the bytes of a directory, and eviction of the objects that were used longest ago.

Several processes and hosts write into one directory, and none of them keeps a table of it. Each process estimates the
bytes: the total of its last scan, and its own puts since. A put scans first if the process has put a sixteenth of the
limit since the last scan, or if the estimate leaves no room. A scan removes files that killed writers have left in
tmp/, and evicts, by the times of the files, which a read renews at most once a minute, until LOW of the limit is used.

Owns: the estimate, and the removal of old objects and of files that a killed writer left. Does not own: the reading and
writing of objects (`directory`).

Limits: between two scans, the directory may exceed its limit by a sixteenth for each other process that writes. A scan
reads the whole directory, twice if it evicts, and other puts of the process wait for it.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from ...errors import TierFull, TierTooLarge

TMP: Final = "tmp"
LEFTOVER_S: Final = 3600.0
"""The age of a file in tmp/ from which on its writer is taken for dead. Clocks of hosts differ by less."""
LOW: Final = 0.9
"""The share of the limit to which a scan evicts."""
_HIGH: Final = 0.95
_SCAN_SHARE: Final = 16


class DirectoryRoom:
    """At most `limit_bytes` of objects in the folders of `base`, files in tmp/ included."""

    def __init__(self, base: Path, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._base = base
        self._scanning = threading.Lock()
        self._used_bytes = 0
        self._scan_after_bytes = 0
        """So much may be put before the next scan."""

    def make(self, size_bytes: int) -> None:
        """Counts an object that is about to be written. Evicts others before, if the limit would be exceeded.

        Raises:
            TierTooLarge: the object is larger than the limit.
            TierFull: eviction has made no room for it.
        """
        if size_bytes > self.limit_bytes:
            raise TierTooLarge(
                f"dir://{self._base.parent}: an object of {size_bytes} bytes is larger than the limit of "
                f"{self.limit_bytes} bytes; raise `bytes` in the URL"
            )
        with self._scanning:
            self._scan_after_bytes -= size_bytes
            if self._scan_after_bytes < 0 or self._used_bytes + size_bytes > self.limit_bytes:
                with suppress(OSError):  # the put meets the same fault, and reports it
                    self._scan(self.limit_bytes - size_bytes)
            if self._used_bytes + size_bytes > self.limit_bytes:
                raise TierFull(
                    f"dir://{self._base.parent}: {self._used_bytes} of {self.limit_bytes} bytes are used, and eviction "
                    f"has made no room for {size_bytes} more; raise `bytes` in the URL"
                )
            self._used_bytes += size_bytes

    def _scan(self, most_bytes: int) -> None:
        """Counts the bytes anew, and removes old objects if there are more than `most_bytes`."""
        self._used_bytes, dead_s = 0, time.time() - LEFTOVER_S
        for entry, about in self._files(TMP):
            if about.st_mtime < dead_s:
                with suppress(FileNotFoundError):
                    os.unlink(entry.path)
            else:
                self._used_bytes += about.st_size
        times, sizes = array("q"), array("q")
        for _, about in self._objects():
            times.append(about.st_mtime_ns)
            sizes.append(about.st_size)
        self._used_bytes += sum(sizes)
        self._scan_after_bytes = self.limit_bytes // _SCAN_SHARE
        if not sizes or self._used_bytes <= min(int(self.limit_bytes * _HIGH), most_bytes):
            return
        least_bytes = min(int(self.limit_bytes * LOW), most_bytes)
        order = np.argsort(np.frombuffer(times, np.int64), kind="stable")
        freed = np.cumsum(np.frombuffer(sizes, np.int64)[order])
        last = int(np.searchsorted(freed, self._used_bytes - least_bytes))
        last_ns = times[order[min(last, len(order) - 1)]]
        for entry, about in self._objects():
            if self._used_bytes <= least_bytes:
                break
            if about.st_mtime_ns <= last_ns:
                with suppress(FileNotFoundError):
                    os.unlink(entry.path)
                    self._used_bytes -= about.st_size

    def _objects(self) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        """In a random order of folders, so that processes which evict at once begin at different ones."""
        names: list[str] = []
        with suppress(FileNotFoundError):
            names = [name for name in os.listdir(self._base) if len(name) == 2]
        for number in np.random.default_rng().permutation(len(names)):
            yield from self._files(names[number])

    def _files(self, folder: str) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        with suppress(FileNotFoundError), os.scandir(self._base / folder) as found:
            for entry in found:
                with suppress(FileNotFoundError):  # another process has evicted it
                    about = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(about.st_mode):
                        yield entry, about
