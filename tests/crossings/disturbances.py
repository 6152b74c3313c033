"""The disturbances: of the party, its connection, the daemon, and the entries.

A new disturbance needs one more class here, and its line in DISTURBANCES.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final

import tensord
from tensord.errors import TensordError
from tensord.ipc.messages import control as messages

from ..daemon_process import MIB, PATIENCE_S
from ..faults.raw import RawClient
from .payloads import key_of, words

if TYPE_CHECKING:
    from .cell import Cell


class Disturbance:
    """`loses`: entries without a view may be gone afterwards. `refuses`: it may cause refused puts."""

    name: ClassVar[str]
    loses: ClassVar[bool] = False
    refuses: ClassVar[bool] = False

    @contextmanager
    def around(self, cell: Cell) -> Iterator[None]:
        """A context from before the state is entered until all checks have passed."""
        yield

    def apply(self, cell: Cell) -> None:
        """Applies the disturbance. If the state is under way, the daemon is stopped until `cell.resume()`."""
        raise NotImplementedError  # each class has its own


# ---- in the process that holds the state


class ForkChildExits(Disturbance):
    name = "fork, child drops its copies and exits"

    def apply(self, cell: Cell) -> None:
        cell.tell("fork", "exits")


class ForkChildUses(Disturbance):
    """Parent and child continue side by side (see the cell), and the parent releases first."""

    name = "fork, child uses its copies"

    def apply(self, cell: Cell) -> None:
        cell.tell("fork", "uses")
        cell.forked = True


class ForkTwice(Disturbance):
    """At the second fork the daemon may not have read all messages from before the first."""

    name = "fork, and once more when attached again"

    def apply(self, cell: Cell) -> None:
        cell.tell("fork", "exits")
        cell.resume()
        cell.tell("attached")
        cell.tell("fork", "exits")


class ForkFromThread(Disturbance):
    name = "fork from a thread"

    def apply(self, cell: Cell) -> None:
        cell.tell("fork_in_thread")


class ForkWhileLeasing(Disturbance):
    name = "lease taken between a fork's hooks"

    def apply(self, cell: Cell) -> None:
        cell.tell("fork_while_leasing")


class SocketCut(Disturbance):
    name = "socket cut"

    def apply(self, cell: Cell) -> None:
        cell.tell("cut")


class NewLane(Disturbance):
    """A fork while one view is under the old lane and another under the new lane."""

    name = "re-attached with a new lane, then fork"

    def apply(self, cell: Cell) -> None:
        cell.tell("cut_without_lane")
        cell.resume()
        cell.tell("attached_and_took")
        cell.tell("fork", "exits")


class ClientClosed(Disturbance):
    name = "client closed"

    def apply(self, cell: Cell) -> None:
        cell.tell("close_client")


class ClientCollected(Disturbance):
    name = "client collected"

    def apply(self, cell: Cell) -> None:
        cell.tell("collect_client")


class ClosedThenFork(Disturbance):
    name = "client closed, then fork"

    def apply(self, cell: Cell) -> None:
        cell.tell("close_client")
        cell.tell("fork", "exits")


class CollectedThenFork(Disturbance):
    name = "client collected, then fork"

    def apply(self, cell: Cell) -> None:
        cell.tell("collect_client")
        cell.tell("fork", "exits")


# ---- in the daemon


class Busy(Disturbance):
    """Two other clients put and evict all the time."""

    name = "daemon busy"

    @contextmanager
    def around(self, cell: Cell) -> Iterator[None]:
        stop = threading.Event()

        def flood(number: int) -> None:
            with tensord.Client(cell.daemon.socket) as client:
                keys = [key_of(cell.namespace, f"flood-{number}-{at}") for at in range(4)]
                payloads = [words(key) for key in keys]
                under_way: list[tensord.Put] = []
                while not stop.is_set():
                    with suppress(TensordError):
                        client.evict(*keys)
                    begun = [client.put(*each, timeout_s=PATIENCE_S) for each in zip(keys, payloads, strict=True)]
                    # More puts under way than the ring can hold would evict other clients' entries, which is correct.
                    for put in under_way:
                        put.wait(PATIENCE_S)
                    under_way = begun
                with suppress(TensordError):
                    client.evict(*keys)

        threads = [threading.Thread(target=flood, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            cell.resume()
            stop.set()
            for thread in threads:
                thread.join(PATIENCE_S)

    def apply(self, cell: Cell) -> None:
        cell.resume()
        cell.jitter()


class BusyAndCut(Busy):
    """At the second cut the daemon may not have read all messages from before the first."""

    name = "socket cut twice while the daemon is busy"

    def apply(self, cell: Cell) -> None:
        cell.tell("cut")
        cell.resume()
        cell.tell("attached")
        cell.tell("cut")


class Stopped(Disturbance):
    """SIGSTOP: the party continues during the stop, the daemon after it."""

    name = "daemon stopped, and on"

    def apply(self, cell: Cell) -> None:
        cell.stop()


class Terminated(Disturbance):
    """The party continues while the daemon stops."""

    name = "SIGTERM and restart"

    def apply(self, cell: Cell) -> None:
        with cell.asked(cell.restart):
            cell.tell("go_on", True)


class TerminatedAtWork(Terminated):
    """As Terminated, but the daemon has begun to handle the pending calls."""

    name = "resumed, SIGTERM and restart"

    def apply(self, cell: Cell) -> None:
        cell.resume()
        cell.jitter()
        super().apply(cell)


class Killed(Disturbance):
    name = "SIGKILL and restart"

    def apply(self, cell: Cell) -> None:
        cell.restart(kill=True)


class KilledAtWork(Disturbance):
    name = "resumed, SIGKILL and restart"

    def apply(self, cell: Cell) -> None:
        cell.resume()
        cell.jitter()
        cell.restart(kill=True)


class KilledThenFork(Disturbance):
    """A fork while the client has lost its daemon and is not attached to the next."""

    name = "SIGKILL, fork, restart"

    def apply(self, cell: Cell) -> None:
        cell.daemon.kill()
        cell.tell("fork", "exits")
        cell.started()


class Dropped(Disturbance):
    """SIGINT: the memory is removed, and the next daemon starts without any."""

    name = "restart with new memory"
    loses = True

    def apply(self, cell: Cell) -> None:
        cell.daemon.interrupt()
        cell.started()
        # Generations live as long as the ring.
        cell.generation = 0


class OtherSettings(Disturbance):
    """A restart with other settings, and later one with the old settings."""

    settings: ClassVar[dict[str, object]]

    @contextmanager
    def around(self, cell: Cell) -> Iterator[None]:
        before = dict(cell.daemon.flags)
        try:
            yield
        finally:
            cell.daemon.flags = before
            cell.renew = True

    def apply(self, cell: Cell) -> None:
        cell.daemon.flags = {**cell.daemon.flags, **self.settings}
        cell.restart()


class OtherRing(OtherSettings):
    def apply(self, cell: Cell) -> None:
        super().apply(cell)
        wanted = self.settings["ring_bytes"]
        cell.daemon.until(lambda s: s["ring_bytes"] == wanted, f"a ring of {wanted} bytes")


class LargerRing(OtherRing):
    name = "restart with a larger ring"
    settings: ClassVar = {"ring_bytes": 7 * MIB}


class SmallerRing(OtherRing):
    name = "restart with a smaller ring"
    settings: ClassVar = {"ring_bytes": 3 * MIB}
    loses = True


class OtherLimits(OtherSettings):
    name = "restart with other limits"
    settings: ClassVar = {
        "limits_object_bytes_max": MIB,
        "max_entries": 2048,
    }
    refuses = True


class LimitDownAndUp(Disturbance):
    name = "ring limit down and up"
    loses = True
    refuses = True

    def apply(self, cell: Cell) -> None:
        with cell.asked(lambda: self.limit(cell, 1 * MIB)):
            cell.resume()
        self.limit(cell, cell.daemon.flags["ring_bytes"])

    def limit(self, cell: Cell, limit_bytes: Any) -> None:
        with RawClient(cell.daemon.socket, attach=False) as operator:
            operator.ask(lambda number: messages.Limit(number, limit_bytes))


class PagePressure(Disturbance):
    """The host fills up; the ring returns pages to the system and takes them again."""

    name = "page pressure"
    loses = True
    refuses = True

    def apply(self, cell: Cell) -> None:
        cell.host.occupy(int(0.90 * cell.host.capacity_bytes))
        cell.resume()
        # A ring that was made smaller before keeps the pages beyond its new size withdrawn.
        cell.daemon.until(lambda s: not self._whole(s["store"]), "pages to be given back")
        cell.tell("look")
        cell.host.occupy(0)
        cell.daemon.until(lambda s: self._whole(s["store"]), "pages to be taken again")

    @staticmethod
    def _whole(store: dict[str, Any]) -> bool:
        return bool(store["resident_bytes"] >= store["max_bytes"])


# ---- to the entries


class Invalidated(Disturbance):
    """Another client invalidates the weights; the party continues with the old namespace."""

    name = "invalidate"
    loses = True
    refuses = True

    def apply(self, cell: Cell) -> None:
        with cell.asked(lambda: cell.other.invalidate(cell.namespace)):
            cell.resume()
        cell.generation = 1
        # Payloads of other weights, under the current keys.
        for name in ("kept", "beside"):
            cell.put(name)


class InvalidatedThenKilled(Invalidated):
    name = "invalidate, SIGKILL and restart"

    def apply(self, cell: Cell) -> None:
        super().apply(cell)
        cell.restart(kill=True)


class Cleared(Disturbance):
    name = "clear"
    loses = True

    def apply(self, cell: Cell) -> None:
        with cell.asked(lambda: cell.other.clear(cell.namespace)):
            cell.resume()


class PutByAnother(Disturbance):
    """Held entries are evicted and stored again; another client also stores the keys under way."""

    name = "the same keys put by another"

    def apply(self, cell: Cell) -> None:
        def put() -> None:
            cell.other.evict(cell.key("kept"), cell.key("beside"))
            for name in ("mine", "kept", "beside"):
                cell.put(name)

        with cell.asked(put):
            cell.resume()


DISTURBANCES: Final[list[type[Disturbance]]] = [
    ForkChildExits,
    ForkChildUses,
    ForkTwice,
    ForkFromThread,
    ForkWhileLeasing,
    SocketCut,
    NewLane,
    ClientClosed,
    ClientCollected,
    ClosedThenFork,
    CollectedThenFork,
    Busy,
    BusyAndCut,
    Stopped,
    Terminated,
    TerminatedAtWork,
    Killed,
    KilledAtWork,
    KilledThenFork,
    Dropped,
    LargerRing,
    SmallerRing,
    OtherLimits,
    LimitDownAndUp,
    PagePressure,
    Invalidated,
    InvalidatedThenKilled,
    Cleared,
    PutByAnother,
]
BY_NAME: Final = {disturbance.name: disturbance for disturbance in DISTURBANCES}
