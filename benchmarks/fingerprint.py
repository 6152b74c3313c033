"""Measures how long an engine waits at its start for the name of a checkpoint: the first time, and later times.

    python benchmarks/fingerprint.py [--gib 5] [--vision-share 0.2]

Owns: a checkpoint of random tensors, which it writes in full and removes. Each start is a new process, as with an
engine. A "cold" start reads from the disk. A "warm" start reads from the page cache, where a checkpoint stays after an
engine has loaded it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np

from tensord.client.identity.digest import ALGORITHM
from tensord.client.identity.remembered import SETTLED_S

TENSOR_BYTES_MAX: Final = 64 << 20
_START: Final = (
    "import sys, time; from tensord.client.identity.checkpoints import weights_fingerprint as name; "
    "began = time.perf_counter(); named = name(sys.argv[1]); print(time.perf_counter() - began, named)"
)


def write_checkpoint(folder: Path, size_bytes: int, vision_share: float) -> None:
    """Writes a checkpoint of this size: the tensors of a vision tower, then the layers of a language model."""
    tensor_bytes = min(TENSOR_BYTES_MAX, size_bytes // 8)
    count = size_bytes // tensor_bytes
    names = [
        f"visual.blocks.{number}.mlp.weight"
        if number < count * vision_share
        else f"model.layers.{number}.mlp.gate_proj.weight"
        for number in range(count)
    ]
    header = {
        name: {"dtype": "U8", "shape": [tensor_bytes], "data_offsets": [at * tensor_bytes, (at + 1) * tensor_bytes]}
        for at, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    random = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in names:
            file.write(random.bytes(tensor_bytes))
        os.fsync(file.fileno())
    (folder / "config.json").write_text("{}")


def started(folder: Path) -> tuple[float, str]:
    """Starts a process that names the checkpoint. Returns the seconds and the name."""
    told = subprocess.run([sys.executable, "-c", _START, str(folder)], capture_output=True, text=True, check=True)
    took_s, name = told.stdout.split()
    return float(took_s), name


def forgotten(folder: Path) -> None:
    """Removes the cached fingerprint of the checkpoint."""
    for note in folder.glob(".*"):
        note.unlink()


def cooled(folder: Path) -> None:
    """Drops the checkpoint's pages from the page cache."""
    with (folder / "model.safetensors").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=5)
    parser.add_argument("--vision-share", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="the folder of the checkpoint; default: a temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tensord-fingerprint-", dir=given.folder) as made:
        folder = Path(made)
        write_checkpoint(folder, int(given.gib * (1 << 30)), given.vision_share)
        time.sleep(SETTLED_S)  # A fingerprint of a file that has just been written is not cached.
        took: dict[str, list[float]] = {"first, cold": [], "first, warm": [], "second": []}
        names = set()
        for _ in range(given.rounds):
            for kind, of_kind in took.items():
                if kind == "first, cold":
                    cooled(folder)
                if kind != "second":
                    forgotten(folder)
                took_s, name = started(folder)
                of_kind.append(took_s)
                names.add(name)
        assert len(names) == 1, "one checkpoint has several names"
    size = f"{given.gib:g} GiB, {given.vision_share:.0%} of it read whole, {ALGORITHM}"
    print(f"{size}, median and slowest of {given.rounds}, in ms")
    for kind, of_kind in took.items():
        print(f"{kind:12} {1000 * median(of_kind):10.1f} {1000 * max(of_kind):10.1f}")


if __name__ == "__main__":
    main()
