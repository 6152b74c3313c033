"""The process that the disturbance affects: it holds a State, forks, loses its client, and continues.

Owns: its client, its keys, the outcomes of its puts, and the forked process. Every method that a cell names runs here
and raises AssertionError for a wrong byte.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import socket
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import tensord
from tensord.errors import TensordError

from .. import at_fork
from ..daemon_process import PATIENCE_S, until
from ..processes import Stage
from . import states
from .payloads import ENTRY_BYTES, KIB, expect, key_of, namespace, words

NEXT_BYTES = 240 * KIB
# While the daemon is stopped, a call ends after this time.
BRIEF_S = 0.05


@dataclass(frozen=True)
class Place:
    """The place of a cell: `revision` names its namespace, `jitter_s` is the longest random pause."""

    socket: Path
    card_folder: Path
    revision: str
    timeout_s: float
    seed: str = ""
    jitter_s: float = 0.0


def answered(client: tensord.Client, key: bytes) -> None:

    def answers() -> bool:
        try:
            client.touch(key)
        except TensordError:
            return False
        return True

    until(answers, "the daemon to answer the client")


def run(stage: Stage, place: Place, state: str) -> None:
    """Carries out the cell's orders until the cell closes the pipe."""
    # The cells check refusals as outcomes.
    logging.getLogger("tensord").setLevel(logging.CRITICAL)
    # Garbage collections skip the imported modules.
    gc.freeze()
    party = Party(place, state)
    stage.tell("ready")
    while True:
        method, arguments = stage.hear()
        if method == "end":
            party.client and party.client.close()
            stage.tell("ended")
            return
        party.jitter()
        stage.tell(getattr(party, method)(*arguments))


class Party:
    patience_s = PATIENCE_S

    def __init__(self, place: Place, state: str) -> None:
        self.place = place
        self.namespace = namespace(place.revision)
        self.random = Random(f"{place.seed} party")
        self.client: Any = self.connect()
        # On a busy machine it takes longer than the client waits for it.
        self.answered(self.client)
        self.outcomes: dict[str, tensord.Put] = {}
        self.taken: list[Any] = []
        self.forked: _Forked | None = None
        self.state = states.BY_NAME[state](self)

    # ---- for states

    def key(self, name: str) -> bytes:
        return key_of(self.namespace, name)

    def connect(self) -> tensord.Client:
        return tensord.Client(self.place.socket, timeout_s=self.place.timeout_s)

    def got(self, name: str, client: tensord.Client | None = None) -> tensord.Lease:
        lease = (client or self.client).get(self.key(name))
        assert lease is not None, f"{name!r} is missing"
        return lease

    def put(
        self, name: str, size_bytes: int = ENTRY_BYTES, *, wait: bool = False, timeout_s: float = PATIENCE_S
    ) -> None:
        key = self.key(name)
        self.outcomes[name] = self.client.put(key, words(key, size_bytes), wait=wait, timeout_s=timeout_s)

    def has_room(self, size_bytes: int) -> None:
        """Puts until the client has a place ahead of need: so much is put then without an answer of the daemon, which
        lends 1/64 of the ring ahead."""

        def has_place() -> bool:
            writer = self.client.link.puts.writer
            if writer is not None and writer.arena.left_bytes > size_bytes:
                return True
            self.put(f"first-{len(self.outcomes)}", size_bytes, wait=True)
            return False

        until(has_place, "a place ahead of need")

    def answered(self, client: tensord.Client) -> None:
        answered(client, self.key("kept"))

    def jitter(self) -> None:
        if self.place.jitter_s:
            time.sleep(self.random.random() * self.place.jitter_s)

    # ---- the steps of a cell

    def prepare(self) -> None:
        self.state.prepare()

    def enter(self) -> None:
        self.state.enter()

    def go_on(self, stopped: bool) -> None:
        """The next steps of the program: reads, and puts of other keys; `stopped`: the daemon is stopped."""
        if self.client is None:
            if stopped:
                return
            self.client = self.connect()
        self.read(self.client, "kept", "beside")
        # The first put is as large as the pending one; the others are sent in one message.
        for number, size_bytes in enumerate((self.state.size_bytes, NEXT_BYTES, NEXT_BYTES)):
            self.put(f"next-{number}", size_bytes, timeout_s=BRIEF_S if stopped else PATIENCE_S)

    def go_on_again(self) -> dict[str, str]:
        """More puts, while a forked process still uses its copies. Returns the outcomes by name."""
        names = [f"later-{number}" for number in range(8)]
        for name in names:
            self.put(name, self.state.size_bytes, wait=True)
            self.read(self.client, name)
        return {name: self.outcomes[name].state for name in names}

    def settle(self) -> dict[str, str]:
        """Waits until the client is attached and every put has an outcome. Returns the outcomes by name."""
        self.attached()
        self.state.settle()
        self.put("last", wait=True)
        return {name: put.wait(PATIENCE_S).state for name, put in self.outcomes.items()}

    def check(self) -> None:
        """Checks every byte that the party holds, and every byte of new gets."""
        self.state.check()
        for name, tree in self.taken:
            expect(tree, self.key(name), f"the view of {name!r} that another thread took")
        self.read(self.client, "kept", "beside", *self.outcomes)

    def leave(self) -> None:
        self.taken.clear()
        self.state.drop()
        gc.collect()

    def read(self, client: tensord.Client, *names: str) -> None:
        for name in names:
            lease = client.get(self.key(name))
            if lease is not None:
                expect(lease.tree, self.key(name), f"a get of {name!r}")

    # ---- disturbances from within the process

    def cut(self) -> None:
        channel = self.client.link.attachment.channel if self.client is not None else None
        if channel is not None:
            with suppress(OSError):
                channel._sock.shutdown(socket.SHUT_RDWR)

    def cut_without_lane(self) -> None:
        """Breaks the connection, and drops the lane, so that the next connection gets a new lane."""
        if self.client is not None and self.client.link._lane_fd >= 0:
            os.close(self.client.link._lane_fd)
            self.client.link._lane_fd = -1
        self.cut()

    def close_client(self) -> None:
        if self.client is not None:
            self.client.close()
        self.client = None

    def collect_client(self) -> None:
        self.client = None
        gc.collect()

    def attached(self) -> None:
        if self.client is None:
            self.client = self.connect()
        self.answered(self.client)

    def attached_and_took(self) -> None:
        """Attaches again, and takes one more view under the current lane."""
        self.attached()
        lease = self.client.get(self.key("beside"))
        if lease is not None:
            self.taken.append(("beside", lease.tree))

    def look(self) -> None:
        self.state.check()

    def fork(self, child: str) -> None:
        """Forks. The child drops its copies and exits ("exits"), or stays for orders ("uses")."""
        ours, theirs = Pipe()
        pid = os.fork()
        if not pid:
            ours.close()
            self._run_as_child(theirs, serves=child == "uses")
        theirs.close()
        forked = _Forked(pid, ours)
        if child == "exits":
            forked.end()
        else:
            self.forked = forked

    def _run_as_child(self, pipe: Connection, *, serves: bool) -> None:
        """Never returns."""
        try:
            while serves and (what := pipe.recv()) != "end":
                pipe.send(("told", getattr(self, what)()))
            self.leave()
        except EOFError:
            pass
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))
            os._exit(1)
        os._exit(0)

    def use_as_child(self) -> dict[str, str]:
        """The child uses its inherited views, and a client. Returns the outcomes of its puts."""
        self.state.in_child()
        self.outcomes = {}
        if self.client is None:
            self.client = self.connect()
        self.answered(self.client)
        for number in range(3):
            self.put(f"child-{number}", NEXT_BYTES)
        return {name: put.wait(PATIENCE_S).state for name, put in self.outcomes.items()}

    def fork_in_thread(self) -> None:
        thread = threading.Thread(target=self.fork, args=("exits",))
        thread.start()
        thread.join()

    def fork_while_leasing(self) -> None:
        """Another thread takes a lease between the library's check before a fork and the fork."""
        assert at_fork.BEFORE_THE_LIBRARY, "run the tests in the repository's root: tests.at_fork was not preloaded"
        now, done = threading.Event(), threading.Event()

        def take() -> None:
            now.wait()
            lease = self.client.get(self.key("beside")) if self.client is not None else None
            if lease is not None:
                self.taken.append(("beside", lease.tree))
            del lease
            done.set()

        def let_it_take() -> None:
            now.set()
            # The lease may have to wait for the end of the fork.
            done.wait(0.5)

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        at_fork.last_before_fork.append(let_it_take)
        try:
            self.fork("exits")
        finally:
            at_fork.last_before_fork.clear()
        thread.join(PATIENCE_S)

    def forked_uses(self) -> dict[str, str]:
        assert self.forked is not None
        outcomes: dict[str, str] = self.forked.ask("use_as_child")
        return outcomes

    def forked_check(self) -> None:
        assert self.forked is not None
        self.forked.ask("check")

    def forked_end(self) -> None:
        assert self.forked is not None
        self.forked.pipe.send("end")
        self.forked.end()
        self.forked = None


class _Forked:
    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid = pid
        self.pipe = pipe

    def ask(self, what: str) -> Any:
        self.pipe.send(what)
        assert self.pipe.poll(PATIENCE_S), "the forked process has not answered"
        try:
            kind, answer = self.pipe.recv()
        except EOFError:
            raise AssertionError(f"the forked process ended with {os.waitpid(self.pid, 0)[1]}") from None
        assert kind == "told", f"in the forked process:\n{answer}"
        return answer

    def end(self) -> None:
        fd = os.pidfd_open(self.pid)
        try:
            assert select.select([fd], [], [], PATIENCE_S)[0], "the forked process does not end"
        finally:
            os.close(fd)
        _, status = os.waitpid(self.pid, 0)
        text = ""
        with suppress(EOFError):
            text = self.pipe.recv()[1]
        assert not status, f"the forked process ended with {os.waitstatus_to_exitcode(status)}\n{text}"
