"""Starts daemons on damaged segments. A daemon refuses to start, or serves the sound entries and no wrong payload.

`segments` starts the cores in this process, hundreds of times a minute, and continues the simulation on the recovered
memory. `restarts` starts the real daemon.
"""

from __future__ import annotations

import gc
import os
import random
from typing import Any, Final

import tensord
from tensord.errors import Corrupt, TensordError

from ..daemon_process import PATIENCE_S, until
from ..simulation.world import World
from .besieged import ENTRIES, Besieged, key, payload
from .damage import damage

STEPS: Final = 120
STEPS_AFTER: Final = 80
RESTARTS: Final = 8


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
