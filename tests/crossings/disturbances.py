"""The disturbances: of the party, its connection, the daemon, and the entries. A new one is a line in DISTURBANCES."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import tensord
from tensord.errors import TensordError
from tensord.ipc.messages import control as messages

from ..daemon_process import MIB, PATIENCE_S
from ..faults.raw import RawClient
from .payloads import key_of, words

if TYPE_CHECKING:
    from .cell import Cell

Apply = Callable[["Cell"], None]


@dataclass(frozen=True)
class Disturbance:
    """`apply` disturbs; if the state is under way, the daemon is stopped until `cell.resume()`. `around`: a context
    from before the state is entered until all checks have passed. `loses`: entries without a view may be gone
    afterwards. `refuses`: it may cause refused puts."""

    name: str
    apply: Apply
    around: Callable[[Cell], AbstractContextManager[None]] = lambda cell: nullcontext()
    loses: bool = False
    refuses: bool = False


FORK: Final = "fork", "exits"
RESUME: Final = ("resume",)
"""The daemon serves again, and may have begun to handle what is pending."""


def told(*orders: tuple[str, ...] | str) -> Apply:
    """The party carries these orders out, in the process that holds the state."""

    def apply(cell: Cell) -> None:
        for order in orders:
            if order is RESUME:
                cell.resume()
                cell.jitter()
            else:
                cell.tell(*([order] if isinstance(order, str) else order))

    return apply


def fork_and_use(cell: Cell) -> None:
    """Parent and child continue side by side (see the cell), and the parent releases first."""
    cell.tell("fork", "uses")
    cell.forked = True


# ---- in the daemon


@contextmanager
def busy(cell: Cell) -> Iterator[None]:
    """Two other clients put and evict all the time."""
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


def terminate(cell: Cell) -> None:
    """The party continues while the daemon stops."""
    with cell.asked(cell.restart):
        cell.tell("go_on", True)


def kill(cell: Cell) -> None:
    cell.restart(kill=True)


def kill_and_fork(cell: Cell) -> None:
    """A fork while the client has lost its daemon and is not attached to the next."""
    cell.daemon.kill()
    cell.tell(*FORK)
    cell.started()


def drop_memory(cell: Cell) -> None:
    """SIGINT: the memory is removed, and the next daemon starts without any."""
    cell.daemon.interrupt()
    cell.started()
    # Generations live as long as the ring.
    cell.generation = 0


def at_work(apply: Apply) -> Apply:
    """The daemon has begun to handle the pending calls."""

    def applied(cell: Cell) -> None:
        told(RESUME)(cell)
        apply(cell)

    return applied


@contextmanager
def settings_come_back(cell: Cell) -> Iterator[None]:
    before = dict(cell.daemon.flags)
    try:
        yield
    finally:
        cell.daemon.flags = before
        cell.renew = True


def restart_with(**settings: object) -> Apply:
    """A restart with other settings. Later cells have the old ones."""

    def apply(cell: Cell) -> None:
        cell.daemon.flags = {**cell.daemon.flags, **settings}
        cell.restart()
        if wanted := settings.get("ring_bytes"):
            cell.daemon.until(lambda s: s["ring_bytes"] == wanted, f"a ring of {wanted} bytes")

    return apply


def limit_down_and_up(cell: Cell) -> None:
    def limit(limit_bytes: Any) -> None:
        with RawClient(cell.daemon.socket, attach=False) as operator:
            operator.ask(lambda number: messages.Limit(number, limit_bytes))

    with cell.asked(lambda: limit(MIB)):
        cell.resume()
    limit(cell.daemon.flags["ring_bytes"])


def press_pages(cell: Cell) -> None:
    """The host fills up; the ring returns pages to the system and takes them again."""

    def whole(store: dict[str, Any]) -> bool:
        return bool(store["resident_bytes"] >= store["max_bytes"])

    cell.host.occupy(int(0.90 * cell.host.capacity_bytes))
    cell.resume()
    # A ring that was made smaller before keeps the pages beyond its new size withdrawn.
    cell.daemon.until(lambda s: not whole(s["store"]), "pages to be given back")
    cell.tell("look")
    cell.host.occupy(0)
    cell.daemon.until(lambda s: whole(s["store"]), "pages to be taken again")


# ---- to the entries


def invalidate(cell: Cell) -> None:
    """Another client invalidates the weights; the party continues with the old namespace."""
    with cell.asked(lambda: cell.other.invalidate(cell.namespace)):
        cell.resume()
    cell.generation = 1
    # Payloads of other weights, under the current keys.
    for name in ("kept", "beside"):
        cell.put(name)


def invalidate_and_kill(cell: Cell) -> None:
    invalidate(cell)
    kill(cell)


def clear(cell: Cell) -> None:
    with cell.asked(lambda: cell.other.clear(cell.namespace)):
        cell.resume()


def put_by_another(cell: Cell) -> None:
    """Held entries are evicted and stored again; another client also stores the keys under way."""

    def put() -> None:
        cell.other.evict(cell.key("kept"), cell.key("beside"))
        for name in ("mine", "kept", "beside"):
            cell.put(name)

    with cell.asked(put):
        cell.resume()


DISTURBANCES: Final = [
    Disturbance("fork, child drops its copies and exits", told(FORK)),
    Disturbance("fork, child uses its copies", fork_and_use),
    # At the second fork, or cut, the daemon may not have read all messages from before the first.
    Disturbance("fork, and once more when attached again", told(FORK, RESUME, "attached", FORK)),
    Disturbance("fork from a thread", told("fork_in_thread")),
    Disturbance("lease taken between a fork's hooks", told("fork_while_leasing")),
    Disturbance("socket cut", told("cut")),
    # A fork while one view is under the old lane and another under the new lane.
    Disturbance("re-attached with a new lane, then fork", told("cut_without_lane", RESUME, "attached_and_took", FORK)),
    Disturbance("client closed", told("close_client")),
    Disturbance("client collected", told("collect_client")),
    Disturbance("client closed, then fork", told("close_client", FORK)),
    Disturbance("client collected, then fork", told("collect_client", FORK)),
    Disturbance("daemon busy", told(RESUME), busy),
    Disturbance("socket cut twice while the daemon is busy", told("cut", RESUME, "attached", "cut"), busy),
    # SIGSTOP: the party continues during the stop, the daemon after it.
    Disturbance("daemon stopped, and on", lambda cell: cell.stop()),
    Disturbance("SIGTERM and restart", terminate),
    Disturbance("resumed, SIGTERM and restart", at_work(terminate)),
    Disturbance("SIGKILL and restart", kill),
    Disturbance("resumed, SIGKILL and restart", at_work(kill)),
    Disturbance("SIGKILL, fork, restart", kill_and_fork),
    Disturbance("restart with new memory", drop_memory, loses=True),
    Disturbance("restart with a larger ring", restart_with(ring_bytes=7 * MIB), settings_come_back),
    Disturbance("restart with a smaller ring", restart_with(ring_bytes=3 * MIB), settings_come_back, loses=True),
    Disturbance(
        "restart with other limits",
        restart_with(limits_object_bytes_max=MIB, max_entries=2048),
        settings_come_back,
        refuses=True,
    ),
    Disturbance("ring limit down and up", limit_down_and_up, loses=True, refuses=True),
    Disturbance("page pressure", press_pages, loses=True, refuses=True),
    Disturbance("invalidate", invalidate, loses=True, refuses=True),
    Disturbance("invalidate, SIGKILL and restart", invalidate_and_kill, loses=True, refuses=True),
    Disturbance("clear", clear, loses=True),
    Disturbance("the same keys put by another", put_by_another),
]
BY_NAME: Final = {disturbance.name: disturbance for disturbance in DISTURBANCES}
