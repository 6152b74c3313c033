"""Damages an instance's files in shared memory: single bits, words and whole structures of any file."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Final

from tensord.shm.ring.layout import (
    ALIGN_BYTES,
    BUCKET_BYTES,
    PAGE_BYTES,
    SLOT_BYTES,
    SPAN_HEADER_BYTES,
    Superblock,
)

from ..daemon_process import SHM_FOLDER

_WORDS: Final = (0, 1, 2, 63, 64, 4096, (1 << 32) - 1, 1 << 47, 1 << 48, 1 << 63, (1 << 64) - 1, (1 << 48) + 1)


def files(instance: str) -> list[Path]:
    return sorted(path for path in SHM_FOLDER.glob(f"tensord.{instance}.*") if not path.name.endswith(".lock"))


def damage(chance: random.Random, instance: str) -> list[str]:
    """Damages one to four places. Returns a description of each."""
    return [_once(chance, files(instance)) for _ in range(chance.choice([1, 1, 2, 4]))]


def _once(chance: random.Random, paths: list[Path]) -> str:
    path = chance.choice([*paths, *[path for path in paths if path.suffix == ".index"] * 2])
    with path.open("r+b", buffering=0) as file:
        fd, size = file.fileno(), os.fstat(file.fileno()).st_size
        if chance.random() < 0.05 or not size:
            size = chance.choice([0, 1, 8, 4095, 4096, size // 2, max(0, size - 1), size + 1, size + 4096])
            os.ftruncate(fd, size)
            return f"{path.name} has {size} bytes"
        at = _place(chance, path, fd, size)
        how = chance.choice(["word", "word", "bit", "bytes", "zeros", "copied"])
        match how:
            case "word":
                word = chance.choice([chance.choice(_WORDS), chance.getrandbits(64)])
                os.pwrite(fd, word.to_bytes(8, "little"), at & ~7)
            case "bit":
                [byte] = os.pread(fd, 1, at)
                os.pwrite(fd, bytes([byte ^ 1 << chance.randrange(8)]), at)
            case "bytes":
                os.pwrite(fd, chance.randbytes(min(chance.randrange(1, 80), size - at)), at)
            case "zeros":
                os.pwrite(fd, bytes(min(chance.choice([8, 64, 128, 4096]), size - at)), at)
            case _:
                # Copy one slot, or one span header, over another.
                unit = SPAN_HEADER_BYTES if path.suffix == ".ring" else SLOT_BYTES
                source, target = (place // ALIGN_BYTES * ALIGN_BYTES for place in (_place(chance, path, fd, size), at))
                there = os.pread(fd, unit, source)
                os.pwrite(fd, there[: max(0, size - target)], target)
        return f"{path.name}: {how} at {at}"


def _place(chance: random.Random, path: Path, fd: int, size: int) -> int:
    """Draws the position of a byte in one of the file's structures."""
    places = [chance.randrange(size)]
    if path.suffix == ".index" and size > PAGE_BYTES:
        try:
            geometry = Superblock.unpack(os.pread(fd, PAGE_BYTES, 0)).geometry
        except Exception:
            return chance.randrange(size)
        line = geometry.buckets_at + chance.randrange(geometry.bucket_count) * BUCKET_BYTES
        places += [
            chance.randrange(80),
            line + chance.randrange(SLOT_BYTES),
            line + chance.randrange(SLOT_BYTES, BUCKET_BYTES),
            line + chance.randrange(SLOT_BYTES, BUCKET_BYTES),
            geometry.generations_at + chance.randrange(64),
        ]
    elif path.suffix == ".ring":
        # A span header begins with "SPAN". The encoded tree follows the header.
        data = os.pread(fd, min(size, 1 << 20), 0)
        found = [at for at in range(0, len(data), 64) if data[at : at + 4] == b"SPAN"]
        if found:
            at = chance.choice(found)
            header = [at + chance.randrange(160), at + chance.randrange(160)]
            places += [*header, at + SPAN_HEADER_BYTES + chance.randrange(64)]
    else:
        places += [chance.randrange(32), chance.randrange(4096, 4096 + 400)]
    return min(chance.choice(places), size - 1)
