"""Rounds in which a client dies at one of its crash points while the daemon and another client continue.

Owns: the child's load, and the checks after its death: its pins, lane, grants and claims are gone, every put that was
answered "stored" is cached, and the witness's views are unchanged. Does not own: payloads and keys (model.py).
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, Final, Self

import tensord

from ..daemon_process import MIB, PATIENCE_S, Daemon, some, until
from ..processes import Child, Stage
from .model import NUMBERS, Held, Model, Name, array_of, reserved_by, tree_of, version_of
from .points import CLIENT, Round, arm, points_of

POINTS: Final = points_of(CLIENT)
_CALLS: Final = 20
_SEEN: Final = 24
"""Entries that the witness stores for the child to read."""
_VERSION_BITS: Final = 8
"""The number of versions that one child may put."""
_PATIENCE_S: Final = 300.0
"""A limit for a slow child: it counts every line that it begins."""


class Session:
    """A daemon, a witness that holds views, and the model; a context manager."""

    def __init__(self) -> None:
        self._daemon = Daemon(ring_bytes=16 * MIB, policy="lru", limits_claim_s=30)
        self._model = Model()
        self._held = Held()
        self._rounds = 0

    @property
    def checked(self) -> int:
        """The number of entries that were compared with the model."""
        return self._model.checked

    def __enter__(self) -> Self:
        self._daemon.__enter__()
        self._daemon.start()
        self._witness = self._daemon.client(timeout_s=PATIENCE_S)
        for number in range(_SEEN):
            name, version = Name(0, 0, number), self._model.new_version()
            put = self._witness.put(name.key, tree_of(name, version), wait=True)
            self._model.put(name, version, put.state)
            if number % 4 == 0:
                self._held.keep(name, some(self._witness.get(name.key)))
        return self

    def __exit__(self, *_: object) -> None:
        self._held.clear()
        self._daemon.__exit__()

    def play(self, turn: Round) -> tuple[str, ...]:
        """Plays one round. Returns the place at which the child died; none if its load did not reach the line. Raises
        AssertionError if an entry is lost, torn or wrong, or something leaked."""
        told = self._daemon.folder / "places"
        told.unlink(missing_ok=True)
        self._rounds += 1
        first = self._rounds << _VERSION_BITS
        with Child(act, self._daemon.socket, turn.group, turn.pattern, turn.at, turn.seed, first, str(told)) as child:
            self._follow(child)
            child.kill()
        self._compare()
        some = [Name(1, 0, number) for number in range(turn.seed % 2, NUMBERS, 2)]
        self._witness.evict(*(name.key for name in some))
        self._model.ended(some, surely=True)
        return tuple(told.read_text().split()) if told.exists() else ()

    def finish(self) -> None:
        self._held.clear()
        self._witness.clear()
        self._daemon.until(lambda s: s["store"]["used_bytes"] == s["store"]["lent_bytes"], "all memory to be free")

    def _follow(self, child: Child) -> None:
        """Records the child's reports of its puts in the model until the child ends."""
        while True:
            try:
                said = child.hear(_PATIENCE_S)
            except AssertionError as error:
                if "ended without a word" in str(error):
                    return
                raise
            if said is None:
                return
            name, version, state = said
            self._model.put(name, version, "unknown" if state == "begun" else state)

    def _compare(self) -> None:
        daemon = self._daemon
        # A process that the child forked checks its views and ends by itself.
        left = {"clients": 1, "lanes": 1, "pins": len(self._held), "claims_held": 0}
        until(lambda: left.items() <= self._left().items(), f"nothing but {left} to be left")
        assert len(daemon.lanes()) == 1, f"leaked: {daemon.lanes()}"
        self._model.check(self._witness, lambda: True)
        self._held.check()
        assert not daemon.status()["store"]["found_corrupt"]

    def _left(self) -> dict[str, int]:
        status = self._daemon.status()
        return {**status, "claims_held": status["store"]["claims_held"]}


# ---- the child


def act(stage: Stage, socket: Path, group: str, pattern: str, at: int, seed: int, first: int, told: str) -> None:
    """A client that dies. It reports each call before it begins and after the answer; the last report is None."""
    chance = random.Random(seed)
    arm([pattern], at, told)
    load = _Load(stage, socket, chance, first)
    for _ in range(_CALLS):
        chance.choice(_CALLS_OF[group])(load)
    load.end()


class _Load:
    def __init__(self, stage: Stage, socket: Path, chance: random.Random, first: int) -> None:
        self.stage = stage
        self.socket = socket
        self.chance = chance
        self.version = first
        self.client = tensord.Client(socket, timeout_s=PATIENCE_S)
        self.held = Held()

    def get(self, verify: bool = False) -> None:
        name = self._known()
        lease = self.client.get(name.key, verify=verify)
        assert lease is not None, f"lost: {name}"
        self._keep(name, lease)

    def get_verified(self) -> None:
        self.get(verify=True)

    def get_many(self) -> None:
        names = [self._known() for _ in range(5)]
        with self.client.get_many([name.key for name in names]) as batch:
            for name, lease in zip(names, batch, strict=True):
                assert lease is not None, f"lost: {name}"
                self._keep(name, lease)

    def release(self) -> None:
        if self.held:
            self.held.pop(self.chance.randrange(len(self.held)))

    def put(self) -> None:
        name, version, tree = self._new()
        self.stage.tell((name, version, self.client.put(name.key, tree, wait=True).state))

    def put_and_go_on(self) -> None:
        name, _, tree = self._new()
        self.client.put(name.key, tree)

    def reserve(self) -> None:
        name, version, tree = self._new()
        if array_of(name, tree).nbytes > 64 << 10:
            return
        reserved = reserved_by(self.client, name, tree)
        if self.chance.random() < 0.2:
            reserved.abandon()
        else:
            self.stage.tell((name, version, reserved.commit(name.key, wait=True).state))

    def compute(self) -> None:
        name, _, tree = self._new()
        version_of(name, self.client.get_or_compute(name.key, lambda: tree))

    def claim(self) -> None:
        claim = self.client.claim(self._new()[0].key)
        until(lambda: claim.state != "asked", "an answer")
        if self.chance.random() < 0.5:
            claim.abandon()

    def attach(self) -> None:
        other = tensord.Client(self.socket, timeout_s=PATIENCE_S)
        name = self._known()
        lease = other.get(name.key)
        if lease is not None:
            self._keep(name, lease)
        if self.chance.random() < 0.7:
            other.close()

    def fork(self) -> None:
        """The forked process checks its views, reads and puts, and ends by itself, also if this process dies."""
        self.get()
        forked = os.fork()
        if not forked:
            code = 1
            try:
                self.held.check()
                self.client.wait_connected(PATIENCE_S)
                self.get()
                self.held.check()
                code = 0
            except BaseException:
                self.stage.fail()
            finally:
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
        assert status in (0, -9), "a forked process has read a wrong payload or none"
        self.held.check()
        self.client.wait_connected(PATIENCE_S)

    def end(self) -> None:
        self.held.check()
        self.stage.tell(None)
        self.stage.hear()

    def _known(self) -> Name:
        return Name(0, 0, self.chance.randrange(_SEEN))

    def _new(self) -> tuple[Name, int, Any]:
        """Records a put before it begins: it may be stored even if this process dies."""
        name = Name(1, 0, self.chance.randrange(NUMBERS))
        self.version += 1
        self.stage.tell((name, self.version, "begun"))
        return name, self.version, tree_of(name, self.version)

    def _keep(self, name: Name, lease: tensord.Lease) -> None:
        self.held.keep(name, lease)
        while len(self.held) > 6:
            self.held.pop(0)


_READS: Final = (_Load.get, _Load.get, _Load.get_verified, _Load.get_many, _Load.release)
_PUTS: Final = (_Load.put, _Load.put, _Load.put_and_go_on, _Load.reserve)
_CALLS_OF: Final = {
    "get": _READS,
    "release": _READS,
    "put": (*_PUTS, _Load.get),
    "reserve": (_Load.reserve, _Load.reserve, _Load.put),
    "claim": (_Load.compute, _Load.claim, _Load.get),
    "attachment": (_Load.attach, _Load.get, _Load.put),
    "fork": (_Load.fork, _Load.get, _Load.put),
}
