"""What happens meanwhile: to the process that holds a state, to its connection, to the daemon, to the entries.

A new disturbance needs one more class here, and its line in DISTURBANCES.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final

import tensord
from tensord.errors import TensordError
from tensord.ipc import messages

from ..daemon_process import MIB, PATIENCE_S
from ..faults.raw import RawClient
from .payloads import key_of, words

if TYPE_CHECKING:
    from .cell import Cell


class Disturbance:
    """`loses`: entries that nobody looks at may be gone after it. `refuses`: puts may be refused for it."""

    name: ClassVar[str]
    loses: ClassVar[bool] = False
    refuses: ClassVar[bool] = False

    @contextmanager
    def around(self, cell: Cell) -> Iterator[None]:
        """Lasts from before the state is entered until all is checked."""
        yield

    def apply(self, cell: Cell) -> None:
        """Where the state is under way the daemon is stopped until `cell.resume()`."""
        raise NotImplementedError  # every one has its own


# ---- in the process that holds the state


class ForkChildExits(Disturbance):
    name = "fork, child drops its copies and exits"

    def apply(self, cell: Cell) -> None:
        cell.tell("fork", "exits")


class ForkChildUses(Disturbance):
    """See the cell: parent and child go on side by side, and the parent lets go first."""

    name = "fork, child uses its copies"

    def apply(self, cell: Cell) -> None:
        cell.tell("fork", "uses")
        cell.forked = True


class ForkTwice(Disturbance):
    """The second time the daemon may not have read all that was sent on the connection before the first."""

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
    """A view under the former lane and one under the new lane meet a fork."""

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
                    # More of them under way than the ring has room for would rightly evict what others stored.
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
    """The second time the daemon may not have read all that was sent on the connection before."""

    name = "socket cut twice while the daemon is busy"

    def apply(self, cell: Cell) -> None:
        cell.tell("cut")
        cell.resume()
        cell.tell("attached")
        cell.tell("cut")


class Stopped(Disturbance):
    """SIGSTOP; the process goes on meanwhile, and then the daemon."""

    name = "daemon stopped, and on"

    def apply(self, cell: Cell) -> None:
        cell.stop()


class Terminated(Disturbance):
    """The process goes on while the daemon stops."""

    name = "SIGTERM and restart"

    def apply(self, cell: Cell) -> None:
        with cell.asked(cell.restart):
            cell.tell("go_on", True)


class TerminatedAtWork(Terminated):
    """The same, and the daemon has begun with what is under way."""

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
    """The fork meets a client that has lost its daemon, and is not attached to the next one yet."""

    name = "SIGKILL, fork, restart"

    def apply(self, cell: Cell) -> None:
        cell.daemon.kill()
        cell.tell("fork", "exits")
        cell.started()


class Dropped(Disturbance):
    """SIGINT: the memory goes, and the next daemon begins with none."""

    name = "restart with new memory"
    loses = True

    def apply(self, cell: Cell) -> None:
        cell.daemon.interrupt()
        cell.started()
        # Generations last as long as the ring.
        cell.generation = 0


class OtherSettings(Disturbance):
    """Restart with other settings, and afterwards with those from before."""

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
        "limits_inbox_bytes_max": MIB // 2,
        "limits_commits_in_flight_max": 4,
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
    """The host fills up, the ring gives pages back, and takes them again."""

    name = "page pressure"
    loses = True
    refuses = True

    def apply(self, cell: Cell) -> None:
        cell.host.occupy(int(0.90 * cell.host.capacity_bytes))
        cell.resume()
        # A ring that was made smaller before keeps pages withdrawn: those beyond its new size.
        cell.daemon.until(lambda s: not self._whole(s["store"]), "pages to be given back")
        cell.tell("look")
        cell.host.occupy(0)
        cell.daemon.until(lambda s: self._whole(s["store"]), "pages to be taken again")

    @staticmethod
    def _whole(store: dict[str, Any]) -> bool:
        return bool(store["resident_bytes"] >= store["max_bytes"])


# ---- to the entries


class Invalidated(Disturbance):
    """Another client says that the weights have changed; the process goes on under the old namespace."""

    name = "invalidate"
    loses = True
    refuses = True

    def apply(self, cell: Cell) -> None:
        with cell.asked(lambda: cell.other.invalidate(cell.namespace)):
            cell.resume()
        cell.generation = 1
        # Other weights' payloads, under the keys of now.
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
    """What is looked at is evicted and stored anew; what is under way is stored by another client as well."""

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
