"""Crash points: every line of named functions, at which a process kills itself by SIGKILL.

The killed code has no hooks. A process is armed before its work begins. A trace function counts the lines that any of
its threads begins, or returns from, within the named functions, and kills the process at the given number. A forked
process inherits the count. A place is written as `module:function+line`; lines count from the function's first, and -1
is the return.

A pattern is `module:qualified name`, the module without "tensord.", with the wildcards of fnmatch.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count
from types import CodeType, FrameType
from typing import Any, Final

_PACKAGE: Final = "tensord."

DAEMON: Final = {
    "commit": (
        "daemon.actors.queues:Queues._advance",
        "daemon.actors.queues:Queues._settle",
        "daemon.store.commit:Commits.take",
        "daemon.store.commit:Commits._continues",
        "daemon.store.commit:Commits._give_up",
        "daemon.store.grants:Grants.carve",
    ),
    "lend": (
        "daemon.store.grants:Grants.lend_all",
        "daemon.store.grants:Grants.give_back",
        "daemon.store.grants:Grants.revoke",
        "daemon.store.slots:Slots.take_all",
        "daemon.store.slots:Slots.revoke",
        "daemon.room.lending:Lending.*",
    ),
    "reclaim": (
        "daemon.store.spans:Spans.hide",
        "daemon.store.spans:Spans.begin_scan",
        "daemon.actors.lanes:*._scan",
        "daemon.store.spans:Spans.scanned",
        "daemon.store.spans:Spans.republish",
        "daemon.store.spans:Spans._leave",
        "daemon.store.slots:Slots.unpublish_all",
        "daemon.store.slots:Slots.release_all",
    ),
    "evict": (
        "daemon.store.spans:Spans.end",
        "daemon.store.slots:Slots.unpublish",
        "daemon.lifetimes.removals:Sweeps.clear",
    ),
    "touch": ("daemon.core.dispatch:Dispatch._of_keys", "daemon.store.slots:Details.set_expires"),
    "pages": (
        "daemon.host_memory.residency:Residency._withdraw",
        "daemon.actors.store:StoreActor._change_pages",
        "daemon.memory.segments:Segments.punch",
        "daemon.memory.segments:Segments.allocate",
        "daemon.host_memory.residency:Residency.punched",
        "daemon.host_memory.residency:Residency.allocated",
    ),
    "recovery": (
        "daemon.memory.opening:opened",
        "daemon.memory.opening:_existing",
        "daemon.memory.opening:_former_superblock",
        "daemon.memory.segments:Segments.__init__",
        "daemon.memory.segments:Segments._find_lanes",
        "shm.index.index:IndexWriter.__init__",
        "shm.index.index:IndexWriter._repair_fingerprints",
        "daemon.recovery.former_slots:*",
        "daemon.recovery.recovery:Recovery.*",
    ),
    "resize": (
        "daemon.memory.opening:_existing",
        "daemon.memory.opening:_former_superblock",
        "daemon.memory.opening:resolved_sizes",
        "daemon.memory.segments:Segments.__init__",
        "daemon.memory.segments:Segments.grow",
        "daemon.room.runway:Runway.grown",
        "daemon.host_memory.residency:Residency._withdraw",
    ),
    "creation": (
        "daemon.memory.opening:opened",
        "daemon.memory.opening:_created",
        "daemon.memory.segments:Segments.__init__",
        "shm.ring.segments:create",
        "shm.index.index:IndexWriter.create",
        "shm.ring.segments:allocate",
    ),
    "removal": ("daemon.memory.segments:Segments.close", "shm.ring.segments:existing", "shm.ring.segments:remove"),
    "attach": (
        "daemon.actors.attachments:Attachments._attach",
        "daemon.memory.segments:Segments.lend_lane",
        "daemon.memory.segments:Segments._new_lane",
        "daemon.memory.segments:Segments._hold",
        "daemon.memory.segments:Segments.orphan",
        "daemon.memory.segments:Segments.forget_abandoned",
    ),
    "invalidate": (
        "daemon.core.dispatch:Dispatch._invalidate",
        "daemon.lifetimes.removals:Sweeps.invalidate",
        "shm.index.generations:GenerationWriter.raise_to",
        "daemon.lifetimes.removals:Sweeps.advance",
        "daemon.lifetimes.removals:Sweeps.answer",
    ),
    "offload": (
        "daemon.governor.devices.devices:Devices.register",
        "daemon.governor.devices.devices:Devices.sampled",
        "daemon.governor.devices.devices:Devices._begin",
        "daemon.governor.devices.devices:Devices.acknowledge",
        "daemon.actors.governor:GovernorActor._handle",
    ),
}
"""The daemon's points by activity: every function that changes memory which outlives the daemon."""

CLIENT: Final = {
    "get": (
        "client.reading.view:View.get",
        "client.reading.view:View._pinned",
        "client.reading.view:View._pinned_many",
        "shm.lanes.lane:Lane.pin",
        "shm.lanes.lane:Lane.take_many",
    ),
    "release": (
        "shm.lanes.lane:Lane.tie",
        "shm.lanes.lane:Lane.tie_many",
        "shm.lanes.lane:_releaser.<locals>.release",
        "shm.lanes.lane:Lane.tie_many.<locals>.release",
    ),
    "put": (
        "client.writing.puts:Puts.put",
        "client.writing.puts:Puts._open",
        "client.writing.arena:Arena.*",
        "client.writing.memory:RingMemory.hold",
        "client.writing.put:Writer.put",
        "shm.payloads.packing:Packed.write",
        "shm.lanes.records:Submissions.add",
        "client.writing.outcomes:Outcomes.*",
    ),
    "reserve": ("client.writing.put:Reservation.*", "shm.payloads.packing:Whole.write"),
    "claim": (
        "client.computing.claim:Claim.*",
        "client.computing.once:Computation.*",
        "client.link.answers:HeldClaims.hold",
        "client.link.answers:HeldClaims.drop",
    ),
    "attachment": (
        "client.link.link:Link._attach",
        "client.link.link:Link._take_memory",
        "client.reading.view:View.open",
        "shm.lanes.lane:Lane.__init__",
        "client.link.link:Link.close",
    ),
    "fork": (
        "client.threads.forks:_before",
        "client.threads.forks:_in_parent",
        "client.threads.forks:_in_child",
        "client.link.link:Link.after_fork_in_parent",
        "client.link.link:Link.after_fork_in_child",
        "shm.lanes.lane:Lane.freeze",
        "shm.lanes.lane:Lane.suspend",
    ),
}
"""A client's points by activity."""


@dataclass(frozen=True)
class Round:
    """A process dies at the `at`-th line that it begins within a point, `group/pattern`. The seed gives the load."""

    point: str
    at: int
    seed: int

    @property
    def group(self) -> str:
        return self.point.partition("/")[0]

    @property
    def pattern(self) -> str:
        return self.point.partition("/")[2]

    def __str__(self) -> str:
        return f"POINT='{self.point}' AT={self.at} SEED={self.seed}"


def points_of(groups: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{group}/{pattern}" for group, patterns in groups.items() for pattern in patterns]


def arm(patterns: Sequence[str], at: int, told: str) -> None:
    """Arms this process: it dies at the `at`-th line, counted from 1, within the matching functions.

    Args:
        told: the path of a file to which the process writes the place just before it dies.
    """
    trap = _Trap(patterns, at, told)
    threading.settrace(trap)
    sys.settrace(trap)


class _Trap:
    def __init__(self, patterns: Sequence[str], at: int, told: str) -> None:
        self._patterns = [_PACKAGE + pattern for pattern in patterns]
        self._names: dict[CodeType, str | None] = {}
        # All threads share the counter: taking a number is one atomic operation of the interpreter.
        self._lines = count(1)
        self._at = at
        self._told = told

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        try:
            name = self._names[code]
        except KeyError:
            name = self._names[code] = self._matching(frame)
        return None if name is None else self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "exception" and next(self._lines) == self._at:
            code = frame.f_code
            line = frame.f_lineno - code.co_firstlineno if event == "line" else -1
            with open(self._told, "a") as told:
                told.write(f"{self._names[code]}+{line}\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return self._line

    def _matching(self, frame: FrameType) -> str | None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(_PACKAGE):
            return None
        name = f"{module}:{frame.f_code.co_qualname}"
        if not any(fnmatchcase(name, pattern) for pattern in self._patterns):
            return None
        return name.removeprefix(_PACKAGE)
