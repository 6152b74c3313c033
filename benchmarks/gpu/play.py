"""Plays the scenes of scenes.py, each in a process of its own, and adds their checks to a report.

Owns: which scenes are played, with which settings, and what becomes of one that dies or hangs. Does not own: the
scenes, the report (card.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpu.card import Report

SCRIPT: Final = Path(__file__).with_name("scenes.py")
PATIENCE_S: Final = 300.0
# A mount namespace whose /dev/shm is as small as Docker's default. It needs root.
SMALL_SHM: Final = (
    *("unshare", "--mount", "--propagation", "private", "sh", "-c"),
    'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" "$@"',
)


@dataclass(frozen=True, slots=True)
class Play:
    """One scene. `settings`: variables of its environment. `within`: a command that the scene's command is added to."""

    scene: str
    settings: dict[str, str] = field(default_factory=dict)
    within: tuple[str, ...] = ()


def plays(cards: int) -> list[Play]:
    """All scenes, with the settings that torch reads at its start. `cards`: how many torch sees in this process."""
    shown = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each] or [str(cards - 1)]
    allocator = "PYTORCH_CUDA_ALLOC_CONF"
    return [
        Play("round_trip"),
        Play("round_trip", {allocator: "expandable_segments:True"}),
        Play("round_trip", {allocator: "backend:cudaMallocAsync"}),
        Play("engines_memory"),
        Play("visible_devices", {"CUDA_VISIBLE_DEVICES": shown[-1]}),
        *(Play(scene) for scene in ("second_card", "graph_capture", "fork", "two_owners", "emergency", "late_streams")),
        Play("in_place_and_inbox"),
        Play("small_shm", within=SMALL_SHM if _may_mount() else ()),
    ]


def play(report: Report, one: Play, index: int, entry_bytes: int, standin: str | None = None) -> None:
    """Plays a scene, and adds its checks and figures to the report. A scene that does not end well is a failed
    check."""
    # With CUDA_VISIBLE_DEVICES set for it, the scene sees one card.
    index = 0 if "CUDA_VISIBLE_DEVICES" in one.settings else index
    command = [*one.within, sys.executable, str(SCRIPT), one.scene]
    command += ["--device", str(index), "--entry-bytes", str(entry_bytes)]
    command += [] if standin is None else ["--standin", standin]
    named = " ".join([one.scene, *(f"{name}={value}" for name, value in one.settings.items())])
    try:
        done = subprocess.run(
            command,
            env=os.environ | one.settings,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        _add(report, late.stdout or "")
        report.check(f"the scene {named} ends", False, f"it did not end within {PATIENCE_S:g} s")
        return
    _add(report, done.stdout)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        report.check(f"the scene {named} ends", False, f"exit status {done.returncode}: {said}")


def _add(report: Report, printed: str | bytes) -> None:
    text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
    for line in text.splitlines():
        try:
            said: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        if "check" in said:
            report.check(said["check"], said["held"], said["seen"])
        elif "figure" in said:
            report.figure(said["figure"], said["bytes_per_s"])


def _may_mount() -> bool:
    try:
        return subprocess.run([*SMALL_SHM, "true"], capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
