"""One cell of the table: enters a state, applies the disturbance, and checks every promise.

    1. the party enters the state; if a call is to be under way, the daemon is stopped first
    2. the disturbance
    3. the party continues: it reads, and puts other keys
    4. the daemon serves (again); all puts get an outcome
    5. every committed entry is cached, and is f(key) for every other client
    6. other clients overwrite the ring
    7. every view, every new get and every other client's get is checked against f(key)
    8. the party releases everything: no pin, lane, claim, inbox or descriptor stays

Owns: the processes of the cell. Does not own: the daemon, which serves the next cell if this one passes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final

import tensord
from tensord.ipc.messages import control as messages
from tensord.testing.fake_card import FakeCard

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from ..processes import Child
from . import party
from .disturbances import BY_NAME as DISTURBANCES
from .payloads import ENTRY_BYTES, expect, key_of, namespace, words
from .remote import FOLDER
from .states import BY_NAME as STATES

RING_BYTES: Final = 5 * MIB
LARGE_BYTES: Final = MIB
FILLER_BYTES: Final = 4 * ENTRY_BYTES
_LAPS_MAX: Final = 4
_SMALL: Final = 4
_STEPS: Final = 4
_numbers = count(1)


class Cells:
    """One daemon for all cells, as long as they leave it unchanged."""

    def __init__(self, cards: Path) -> None:
        self._cards = cards
        self._daemon: Daemon | None = None

    def run(self, state: str, *disturbances: str, seed: str = "", jitter_s: float = 0.0) -> None:
        """Runs one cell; disturbances come in sequence. `jitter_s`: random pauses between steps, drawn by `seed`.

        Raises:
            AssertionError: a promise is broken.
        """
        if self._daemon is None:
            self._daemon = _daemon(self._cards)
            self._daemon.start()
        cell = Cell(self._daemon, self._cards, state, disturbances, seed, jitter_s)
        try:
            cell.run()
        except BaseException:
            self.end()
            raise
        if cell.renew:
            self.end()

    def end(self) -> None:
        if self._daemon is not None:
            self._daemon.__exit__()
            self._daemon = None


def _daemon(cards: Path) -> Daemon:
    """A small ring, so that it is overwritten soon, gauges that tests control, and a remote store behind the ring."""
    for name, capacity_bytes in (("card", MIB), ("host", 16 * MIB)):
        with FakeCard(cards, name, capacity_bytes):
            pass
    (cards / FOLDER).mkdir(exist_ok=True)
    return Daemon(
        ring_bytes=RING_BYTES,
        policy="lru",
        limits_claim_s=60,
        limits_claim_s_max=120,
        gauges_device="file",
        gauges_host="file",
        gauges_file=cards / "gauges",
        gauges_sample_s="30ms",
        gauges_sample_pressed_s="30ms",
        remote_url=f"dir://{cards / FOLDER}?bytes=64MiB",
    )


class Cell:
    def __init__(
        self, daemon: Daemon, cards: Path, state: str, disturbances: Sequence[str], seed: str, jitter_s: float
    ) -> None:
        self.daemon = daemon
        self.state = STATES[state]
        self.disturbances = [DISTURBANCES[name] for name in disturbances]
        self.random = Random(f"{seed} cell")
        self._jitter_s = jitter_s
        # With random pauses the daemon also reads messages while the party enters the state.
        self._stops = self.state.under_way and (not jitter_s or self.random.random() < 0.5)
        revision = f"{daemon.instance}-{next(_numbers)}"
        self.namespace = namespace(revision)
        self._others = namespace(f"{revision} others")
        self.host = FakeCard(cards, "host")
        self.generation = 0
        self.forked = False
        self.renew = False
        """True if the daemon cannot serve another cell."""
        self._stopped = False
        self._beside: list[bytes] = []
        # While the daemon is stopped, an attach fails after this time.
        timeout_s = 0.5 if self._stops else PATIENCE_S
        self._place = party.Place(daemon.socket, cards, revision, timeout_s, seed, jitter_s)
        self._party: Child | None = None

    def run(self) -> None:
        with self.host, tensord.Client(self.daemon.socket, timeout_s=PATIENCE_S) as self.other:
            assert self.other.connected
            # The ring has room for every entry of the party.
            self.other.clear()
            for name in ("kept", "beside"):
                self.put(name)
            descriptors, segments = self.daemon.descriptors(), self.segments()
            with Child(party.run, self._place, self.state.name) as self._party, ExitStack() as stack:
                for disturbance in self.disturbances:
                    stack.enter_context(disturbance.around(self))
                try:
                    assert self._party.hear() == "ready"
                    self._run()
                finally:
                    self.resume()
            self.at_rest(descriptors, segments)

    def _run(self) -> None:
        self.tell("prepare")
        if self._stops:
            self.stop()
        self.tell("enter")
        for disturbance in self.disturbances:
            self.jitter()
            disturbance.apply(self)
        self.tell("go_on", self._stopped)
        self.resume()
        used = self.tell("forked_uses") if self.forked else {}
        outcomes = self.tell("settle")
        outcomes.update(used)
        self.attached()
        self.committed(outcomes)
        self.right(outcomes)
        self.press()
        self.tell("check")
        if self.forked:
            self.tell("forked_check")
        self.right(outcomes)
        self.tell("leave")
        if self.forked:
            outcomes.update(self.tell("go_on_again"))
            self.press()
            self.tell("forked_check")
            self.right(outcomes)
            self.tell("forked_end")
        assert self._party is not None
        self._party.tell(("end", ()))
        assert self._party.hear() == "ended"
        self._party.wait()

    # ---- for disturbances

    def tell(self, method: str, *arguments: object) -> Any:
        self.jitter()
        assert self._party is not None
        self._party.tell((method, arguments))
        return self._party.hear(2 * PATIENCE_S)

    def stop(self) -> None:
        self.daemon.pause()
        self._stopped = True

    def resume(self) -> None:
        if self._stopped:
            self._stopped = False
            if self.daemon.running:
                self.daemon.resume()

    def restart(self, *, kill: bool = False) -> None:
        if kill:
            self.daemon.kill()
        else:
            self.daemon.terminate()
        self.started()

    def started(self) -> None:
        self._stopped = False
        self.daemon.start()

    def jitter(self) -> None:
        if self._jitter_s:
            time.sleep(self.random.random() * self._jitter_s)

    @contextmanager
    def asked(self, ask: Callable[[], object]) -> Iterator[None]:
        """Asks in a thread, because the daemon may be stopped; waits for the answer at the end."""
        raised: list[BaseException] = []

        def run() -> None:
            try:
                ask()
            except BaseException as error:
                raised.append(error)

        if not self._stopped:
            self.attached()
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            thread.join()
        for error in raised:
            raise error

    def key(self, name: str) -> bytes:
        return key_of(self.namespace, name)

    def attached(self) -> None:
        """Waits until the daemon answers the other client."""
        party.answered(self.other, self.key("kept"))

    def put(self, name: str, size_bytes: int = ENTRY_BYTES) -> None:
        """Another client stores an entry, with the current weights."""
        key = key_of(self.namespace.raised_to(self.generation), name)
        payload = words(key, size_bytes, self.generation)
        put = self.other.put(key, payload, wait=True, timeout_s=PATIENCE_S)
        assert put.state in ("stored", "existed"), put

    # ---- the promises

    def committed(self, outcomes: dict[str, str]) -> None:
        """Every stored entry is cached, and every refusal has a reason."""
        for name, outcome in outcomes.items():
            refused = any(disturbance.refuses for disturbance in self.disturbances)
            allowed = {"stored", "existed", "lost", *(["refused"] if refused else [])}
            assert outcome in allowed, f"the put of {name!r} was {outcome}"
        if any(disturbance.loses for disturbance in self.disturbances):
            return
        stored = [name for name, outcome in outcomes.items() if outcome in ("stored", "existed")]
        for name in ("kept", "beside", *stored):
            if self.other.contains(self.key(name)):
                continue
            why = self.daemon.ask(partial(messages.WhyQuery, key=self.key(name)))
            # The place of a large put is made out of pieces between pinned entries.
            made_room = self.state.size_bytes >= LARGE_BYTES and why["gone"] and why["gone"]["reason"] == "capacity"
            assert made_room, f"the stored entry {name!r} is lost: {why}"

    def press(self) -> None:
        """Other clients store so much that the ring overwrites every entry that no view holds."""
        self.attached()
        ring_bytes = self.daemon.status()["ring_bytes"]
        # Twice: the second pass overwrites what the first one evicted.
        for _ in range(2):
            sentinel = self.store([ENTRY_BYTES])
            for step in range(_LAPS_MAX * _STEPS):
                if not self.other.contains(sentinel):
                    break
                # Small entries too, which fill the gaps between pinned entries. Twice as many in each lap: a sentinel
                # in such a gap goes only if there are no other gaps for them.
                small = _SMALL << step // _STEPS
                self.store([ENTRY_BYTES] * small + [FILLER_BYTES] * (ring_bytes // _STEPS // FILLER_BYTES))
            assert not self.other.contains(sentinel), "the ring is not overwritten"

    def store(self, sizes: Sequence[int]) -> bytes:
        """Stores entries of these sizes by other clients; returns the last key."""
        puts = []
        for number, size_bytes in zip(_numbers, sizes, strict=False):
            key = key_of(self._others, str(number))
            puts.append(self.other.put(key, words(key, size_bytes), timeout_s=PATIENCE_S))
        for put in puts:
            assert put.wait(PATIENCE_S).state == "stored", put
        self._beside += [put.key for put in puts]
        return key

    def right(self, outcomes: dict[str, str]) -> None:
        """Another client, and a new one, find f(key, weights), and never an entry of old weights."""
        with tensord.Client(self.daemon.socket, timeout_s=PATIENCE_S) as fresh:
            for reader in (self.other, fresh):
                now = reader.current(self.namespace)
                assert now.generation >= self.generation, "the generation has decreased"
                for past in range(now.generation + 1):
                    of = self.namespace.raised_to(past)
                    for name in ("kept", "beside", "mine", *outcomes):
                        key = key_of(of, name)
                        lease = reader.get(key, verify=True)
                        if lease is not None:
                            expect(lease.tree, key, f"another client's get of {name!r}", past)
                            assert of == now, f"{name!r} of invalidated weights is found"
        # A late write of the party would damage entries that others stored meanwhile.
        for key in self._beside:
            lease = self.other.get(key)
            if lease is not None:
                expect(lease.tree, key, "another client's get of its own entry")

    def segments(self) -> set[Path]:
        return {
            segment
            for segment in self.daemon.segments()
            if ".lane." not in segment.name and segment.suffix != ".learned"
        }

    def at_rest(self, descriptors: int, segments: set[Path]) -> None:
        """The party leaves nothing behind."""
        self.attached()
        self.daemon.until(
            lambda s: (
                s["clients"] == s["lanes"] == 1
                and not s["pins"]
                and not s["lanes_orphaned"]
                and not s["store"]["claims_held"]
                and not s["store"]["claims_waiting"]
                and s["store"]["found_corrupt"] == 0
            ),
            "the daemon to release everything of the party",
        )
        until(lambda: len(self.daemon.lanes()) == 1, "lanes to be removed")
        assert self.segments() == segments, "shared memory has leaked"
        self.daemon.until(lambda s: not s["inboxes"], "inboxes to be unmapped")
        until(lambda: self.daemon.descriptors() <= descriptors, "descriptors to be closed")
