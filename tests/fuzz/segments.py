"""Starts daemons on damaged segments. A daemon refuses to start, or serves the sound entries and no wrong payload.

`segments` starts the cores in this process, hundreds of times a minute, and continues the simulation on the recovered
memory. `restarts` starts the real daemon.
"""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path
from typing import Any, Final

import tensord
from tensord.errors import Corrupt, TensordError
from tensord.shm.ring import layout
from tensord.shm.ring.layout import BUCKET_BYTES, PAGE_BYTES, SLOT_BYTES, SPAN_HEADER_BYTES

from ..daemon_process import PATIENCE_S, SHM_FOLDER, until
from ..simulation.world import World
from .besieged import ENTRIES, Besieged, key, payload

STEPS: Final = 120
STEPS_AFTER: Final = 80
RESTARTS: Final = 8
_WORDS: Final = (0, 1, 2, 63, 64, 4096, (1 << 32) - 1, 1 << 47, 1 << 48, 1 << 63, (1 << 64) - 1, (1 << 48) + 1)


def segments(chance: random.Random) -> None:
    """Plays one simulated host and damages its memory between two daemons."""
    world = World(chance.getrandbits(40))
    kept: list[int] = []
    try:
        world.run(STEPS)
        world.start_the_daemon()
        assert world.daemon is not None
        # Damage to an entry that has none cannot be found.
        world.daemon.scrubber.take_checksums()
        kept += [os.dup(each.lane_fd) for each in world.processes if each.lane_fd >= 0 and chance.random() < 0.5]
        while world.processes:
            world.processes.pop().die()
        world.end_the_daemon()
        done = damage(chance, world.instance)
        try:
            world.start_after_damage()
        except TensordError:
            return
        try:
            world.run(STEPS_AFTER)
        except AssertionError as error:
            raise AssertionError(f"{error}; the damage: {done}") from error
    finally:
        for fd in kept:
            os.close(fd)
        world.close()
        gc.collect()


def restarts(chance: random.Random, besieged: Besieged) -> None:
    """Stops a real daemon, damages its memory and starts it again, several times."""
    daemon = besieged.daemon
    besieged.leases.clear()
    for _ in range(RESTARTS):
        besieged.end(at_once=chance.random() < 0.5)
        done = damage(chance, daemon.instance)
        process = daemon.spawn()
        with tensord.Client(daemon.socket) as client:
            connected = _serves(process, client)
            assert "Traceback" not in daemon.log, f"after {done}, a traceback:\n{daemon.log[-4000:]}"
            if not connected:
                assert process.poll() == 1, f"after {done}, exit status {process.poll()}:\n{daemon.log[-2000:]}"
                # As the message of the refusal says, removing the segments frees their memory.
                for segment in daemon.segments():
                    segment.unlink()
                daemon.start()
                until(lambda: besieged.client.wait_connected(1.0), "the witness client to attach again")
                besieged.store()
                continue
            _look(client, done)
            for number in range(ENTRIES):
                put = client.put(key(number), payload(number), wait=True, timeout_s=PATIENCE_S)
                assert put.state in ("stored", "existed", "refused"), f"after {done}: {put}"
            _look(client, done)
        assert daemon.running, f"after {done}, the daemon ended:\n{daemon.log[-4000:]}"
        assert "Traceback" not in daemon.log, f"after {done}, a traceback:\n{daemon.log[-4000:]}"


def _serves(process: Any, client: tensord.Client) -> bool:
    """Waits until the daemon has ended or the client is connected. Returns whether the daemon still runs."""
    until(lambda: process.poll() is not None or client.wait_connected(0.2), "the daemon to serve or to end")
    return process.poll() is None


def _look(client: tensord.Client, done: list[str]) -> None:
    for number in range(ENTRIES):
        for verify in (False, True):
            try:
                lease = client.get(key(number), verify=verify)
            except Corrupt:
                continue
            if lease is not None:
                right = lease.tree.shape == payload(number).shape and (lease.tree == payload(number)).all()
                assert right, f"after {done}, entry {number} has a wrong value (verify={verify})"


def damage(chance: random.Random, instance: str) -> list[str]:
    """Damages one to four places of an instance's files. Returns a description of each."""
    files = sorted(path for path in SHM_FOLDER.glob(f"tensord.{instance}.*") if not path.name.endswith(".lock"))
    return [_once(chance, files) for _ in range(chance.choice([1, 1, 2, 4]))]


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
                source, target = (
                    place // layout.ALIGN_BYTES * layout.ALIGN_BYTES for place in (_place(chance, path, fd, size), at)
                )
                there = os.pread(fd, unit, source)
                os.pwrite(fd, there[: max(0, size - target)], target)
        return f"{path.name}: {how} at {at}"


def _place(chance: random.Random, path: Path, fd: int, size: int) -> int:
    """Draws the position of a byte in one of the file's structures."""
    places = [chance.randrange(size)]
    if path.suffix == ".index" and size > PAGE_BYTES:
        try:
            geometry = layout.Superblock.unpack(os.pread(fd, PAGE_BYTES, 0)).geometry
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
