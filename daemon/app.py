"""The daemon as a program: configuration, memory, sockets, signals, and the actors in one task group.

Owns: the order of starting and stopping, and the signals. SIGTERM keeps the ring and the index for the next daemon.
SIGINT, or the setting `drop`, removes them. SIGHUP reloads the configuration. Does not own the work of the actors.

Invariant: the memory is opened before the sockets and closed after them, under the instance's lock. A reload applies
all changed settings that need no restart, or none. A signal during the start is carried out after the start.
"""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Final

import uvloop

from tensord import __version__

from ..errors import BadConfiguration, TensordError
from ..ipc.messages import control as messages
from ..ipc.wire.channel import AsyncChannel
from ..ipc.wire.connection import Connection
from ..ipc.wire.descriptors import peer_of
from ..shm.ring.layout import boot_s
from . import reloading
from .actors.governor import GovernorActor
from .actors.messages import Reloaded
from .actors.pressure import PressureActor
from .actors.store import StoreActor
from .claims.quotas import Quotas
from .config import usage
from .config.config import Config
from .config.limits import NAMESPACES_MAX, governor_limits, quota_rules, store_limits, wire_limits
from .connections.listener import Listener
from .connections.session import Session
from .connections.sockets import Sockets
from .connections.status import Documents, StatusSession, Watchers
from .connections.timing import measure_lag
from .core.store import Store
from .forms.events import RingGrown
from .gauges.gauges import THREAD_NAME, open_gauges
from .gauges.psi import watch_stalls
from .governor.forms import events as governor_events
from .governor.governor import Governor
from .memory import learned
from .memory.opening import ConfiguredSizes
from .memory.scrub import Scrub
from .memory.segments import Segments
from .process import logs, notify
from .process.limits import NO_MEMORY_OR_THREAD, check_descriptors, limit_behind
from .remote_stores import threads as remote
from .remote_stores.store import open_store
from .replacement import Replacement
from .reports.counters import RequestTimes
from .store.entries import StoreMemory
from .web.pages import metrics_server, page_server

_log = logs.logger("tensord")
READ_BYTES: Final = 8192
"""The most bytes read from one connection in one turn of the loop: some hundred small messages, less than 1 ms."""

ENDING_S_MAX: Final = 2.0
"""How long connections stay open at the end for the sake of unanswered requests. A put may wait for room that never
comes."""
_LOOK_EVERY_S: Final = 0.005


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the daemon until a signal ends it, or prints the text for `--help`, `--version` or `--check-config`.

    Returns:
        The exit status: 0 after a clean stop, 2 for a wrong configuration, 1 for any other error that prevents serving.
    """
    environ = os.environ
    argv = sys.argv[1:] if argv is None else argv
    try:
        text = usage.asked(argv, environ)
        if text is not None:
            sys.stdout.write(text)
            return 0
        config = Config.load(argv, environ)
    except BadConfiguration as error:
        print(f"tensord: {error}", file=sys.stderr)
        return 2
    logs.setup(config.log.level, config.log.format, environ)
    for text in config.ignored:
        _log.warning("environment variable ignored", why=text)
    # A full collection visits every entry, about 50 ms at 100,000 entries. The daemon has hardly any cyclic garbage.
    gc.set_threshold(10_000, 20, 1000)
    status = 0
    try:
        check_descriptors()
        uvloop.run(_Daemon(config, argv, environ).run())
    except TensordError as error:
        _log.error("cannot serve", error=error.code, why=str(error))
        status = 2 if isinstance(error, BadConfiguration) else 1
    except Exception as error:
        if limit := limit_behind(error):
            _log.error("cannot serve", error=limit.code, why=str(limit))
        else:
            # One line of the log's format, and not a traceback of many.
            _log.exception("the daemon failed, by a fault of its own: report it")
        status = 1
    if any(thread.name.startswith((THREAD_NAME, remote.THREAD_NAME)) for thread in threading.enumerate()):
        # A driver hangs in a library, whose destructor may wait for that call: they are left out. So is the wait for
        # writes to a remote store.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


@dataclass(frozen=True, slots=True)
class _Parts:
    """The memory, the store's core and the actors of a running daemon."""

    memory: Segments
    core: Store
    store: StoreActor
    governor: GovernorActor
    pressure: PressureActor
    watchers: Watchers


class _Daemon:
    def __init__(self, config: Config, argv: Sequence[str], environ: MutableMapping[str, str]) -> None:
        self._config = config
        self._argv = argv
        self._notifier = notify.Notifier(environ)
        self._activated = notify.listen_sockets(environ)
        self._environ: Mapping[str, str] = dict(environ)
        self._quotas = Quotas(quota_rules(config), os.geteuid(), config.quotas.requests_per_s_max)
        self._stop = asyncio.Event()
        self._drop = config.drop
        self._reloads = 0
        self._times = RequestTimes(config.log.slow_s)

    async def run(self) -> None:
        config = self._config
        began = time.monotonic()
        started: asyncio.Future[_Parts] = asyncio.get_running_loop().create_future()
        # Before the sockets listen: whoever can connect takes the daemon for started, and may send signals.
        self._catch_signals(started)
        derived = frozenset(name for name in ("ring_bytes", "max_entries") if config.is_derived(name))
        sizes = ConfiguredSizes(config.ring_bytes, config.max_entries, NAMESPACES_MAX, derived)
        memory = Segments(config.instance, sizes)
        # New memory is removed again if the daemon cannot listen: it is empty.
        drop = not memory.recovered
        try:
            with Sockets(config, self._activated) as sockets:
                drop = False
                await self._serve(memory, sockets, began, started)
        finally:
            memory.close(drop=drop or self._drop)
            self._notifier.close()

    async def _serve(self, memory: Segments, sockets: Sockets, began: float, started: asyncio.Future[_Parts]) -> None:
        _warn(memory)
        ring_bytes = memory.superblock.limit_bytes
        parts = self._assembled(memory, self._store(memory))
        policy = parts.core.policy
        scrub = Scrub(memory, parts.store.inbox.tell_now, lambda: parts.store.worked_at)
        _take_over(memory, parts.store, policy, scrub)
        parts.store.scrub = scrub.add
        documents = Documents(parts.store.inbox, parts.governor.inbox, lambda: sockets.problems)
        sessions: set[Session] = set()
        listeners = self._listeners(memory, sockets, parts, documents, sessions)
        metrics = metrics_server(sockets.metrics, documents.status, documents.health)
        page = page_server(sockets.page, documents)
        if memory.recovered:
            parts.governor.inbox.tell_now(governor_events.FormerDaemonFound())
        started.set_result(parts)
        serving = asyncio.create_task(parts.store.run())
        async with asyncio.TaskGroup() as tasks:
            runs = (parts.governor.run, parts.pressure.run, metrics.run, page.run, sockets.keep, self._watchdog)
            running = [tasks.create_task(run()) for run in (*(each.run for each in listeners), *runs)]
            running.append(tasks.create_task(measure_lag(self._times)))
            running.append(tasks.create_task(watch_stalls(parts.pressure.sample_now, _log)))
            running.append(tasks.create_task(self._grow(memory, parts.store)))
            running.append(tasks.create_task(scrub.run()))
            running.append(tasks.create_task(learned.keep_saving(memory, policy)))
            running.append(tasks.create_task(_fail_with(serving)))
            _log.info(
                "serving",
                instance=self._config.instance,
                socket=sockets.control.address,
                ring_bytes=ring_bytes,
                epoch=memory.superblock.epoch,
                recovered=memory.recovered,
                after_s=round(time.monotonic() - began, 3),
            )
            status = notify.status(f"serving {ring_bytes} bytes as {self._config.instance}")
            self._notifier.send(notify.READY, status)
            await self._stop.wait()
            self._notifier.send(notify.STOPPING)
            _log.info("stopping", drop=self._drop)
            for listener in listeners:
                listener.stop_accepting()
            if not self._drop:
                await settle(sessions, parts.store)
            for task in running:
                task.cancel()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        if not self._drop:
            learned.save(memory, policy.name, list(policy.learned()))

    def _store(self, memory: Segments) -> Store:
        """The store's core over the memory, still without the entries of a former daemon."""
        superblock = memory.superblock
        return Store(
            StoreMemory(memory.index, memory.index_memory, superblock.geometry, memory.ring_memory, memory.ready_bytes),
            self._config.policy,
            store_limits(self._config, superblock.limit_bytes, superblock.max_entries),
            superblock.epoch,
            seed=secrets.randbits(128),
            quotas=self._quotas,
        )

    def _assembled(self, memory: Segments, store: Store) -> _Parts:
        """The actors, connected to each other."""
        config = self._config
        watchers = Watchers()
        actor = StoreActor(
            store,
            memory,
            config,
            clock=boot_s,
            tell_watchers=watchers.tell,
            is_watched=lambda: watchers.are_told,
            tell_governor=lambda holds: governor.inbox.tell_now(holds),
            times=self._times,
            remote=None if config.remote.url is None else open_store(config.remote.url, config.remote.timeout_s),
        )
        governor = GovernorActor(
            Governor(governor_limits(config)),
            clock=time.monotonic,
            tell_store=actor.inbox.tell_now,
            reading=lambda message: pressure.reading(message),
            hasten=lambda: pressure.hasten(),
            tell_watchers=watchers.tell,
        )
        pressure = PressureActor(
            open_gauges(config.gauges, _log),
            clock=time.monotonic,
            report=governor.inbox.tell_now,
            every_s=lambda: governor.sample_every_s,
        )
        return _Parts(memory, store, actor, governor, pressure, watchers)

    def _listeners(
        self, memory: Segments, sockets: Sockets, parts: _Parts, documents: Documents, sessions: set[Session]
    ) -> list[Listener]:
        """The listeners of the control and the status socket. They keep `sessions`, the connected clients, current."""
        config = self._config
        client_limits = wire_limits(config, memory.superblock.limit_bytes)
        epoch, remote = memory.superblock.epoch, config.remote.url is not None
        welcome = messages.Welcome(0, 0, __version__, config.instance, epoch, client_limits, remote)

        async def serve_client(number: int, accepted: socket.socket) -> None:
            session = Session(
                number,
                AsyncChannel(accepted, Connection.control_server(client_limits), read_bytes=READ_BYTES),
                peer_of(accepted),
                parts.store.inbox,
                parts.governor.inbox,
                self._quotas.rates,
                self._times,
                welcome,
            )
            sessions.add(session)
            try:
                await session.run()
            finally:
                sessions.discard(session)

        async def serve_reader(number: int, accepted: socket.socket) -> None:
            channel = AsyncChannel(accepted, Connection.status_server(client_limits), read_bytes=READ_BYTES)
            uid, rates = peer_of(accepted).uid, self._quotas.rates
            await StatusSession(number, uid, channel, documents, parts.watchers, rates, self._times).run()

        return [
            Listener(sockets.control, "clients", self._quotas, serve_client),
            Listener(sockets.status, "status_clients", self._quotas, serve_reader),
        ]

    def _catch_signals(self, started: asyncio.Future[_Parts]) -> None:
        """SIGHUP reloads the configuration once the parts are `started`."""
        loop = asyncio.get_running_loop()

        def stop(*, drop: bool) -> None:
            self._drop = self._drop or drop
            self._stop.set()

        def reload(started: asyncio.Future[_Parts]) -> None:
            self._reload(started.result())

        loop.add_signal_handler(signal.SIGTERM, lambda: stop(drop=False))
        loop.add_signal_handler(signal.SIGINT, lambda: stop(drop=True))
        loop.add_signal_handler(signal.SIGHUP, started.add_done_callback, reload)

    def _reload(self, parts: _Parts) -> None:
        self._notifier.send(notify.reloading())
        self._reloads += 1
        verdict, accepted = reloading.reload(
            self._config,
            lambda: Config.load(self._argv, self._environ),
            parts.memory.superblock.limit_bytes,
            parts.memory.superblock.max_entries,
        )
        verdict = {"number": self._reloads, "at_unix_s": time.time(), **verdict}
        stores = None
        if accepted is not None:
            config, stores, governors = accepted
            self._config = config
            self._quotas.change_limits(quota_rules(config), config.quotas.requests_per_s_max)
            logs.level(config.log.level)
            self._times.slow_s = config.log.slow_s
            parts.governor.inbox.tell_now(governor_events.GovernorLimitsChanged(governors))
        parts.store.inbox.tell_now(Reloaded(verdict, None if stores is None else (self._config, stores)))
        self._notifier.send(notify.READY, notify.status(reloading.log(self._reloads, verdict)))

    async def _watchdog(self) -> None:
        while self._notifier.watchdog_s is not None:
            self._notifier.send(notify.WATCHDOG)
            await asyncio.sleep(self._notifier.watchdog_s)

    async def _grow(self, memory: Segments, actor: StoreActor) -> None:
        """Allocates and prefaults the rest of the ring piece by piece, while the first piece is in use."""
        ready, ring_bytes = memory.ready_bytes, memory.superblock.ring_bytes
        while ready < ring_bytes:
            try:
                ready = await asyncio.to_thread(
                    memory.grow,
                    ready,
                    prefault=self._config.memory.prefault,
                    huge_pages=self._config.memory.huge_pages,
                )
            except (TensordError, *NO_MEMORY_OR_THREAD) as error:
                _log.error("the ring stays smaller than configured", have_bytes=ready, why=str(error))
                actor.inbox.tell_now(RingGrown(ready, more=False, why=str(error)))
                return
            actor.inbox.tell_now(RingGrown(ready, more=ready < ring_bytes))


async def settle(sessions: Collection[Session], store: StoreActor) -> None:
    """Waits until all requests that have arrived are carried out and answered, for ENDING_S_MAX at most.

    If connections were closed before the answers, clients would treat stored puts as lost, or send them again.
    """
    for session in sessions:
        session.stop_reading()
    deadline = time.monotonic() + ENDING_S_MAX
    while not (store.settled and all(session.settled for session in list(sessions))) and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_EVERY_S)


async def _fail_with(serving: asyncio.Task[None]) -> None:
    """Ends the task group if the store actor ends, because the daemon cannot serve without it."""
    await asyncio.shield(serving)


def _warn(memory: Segments) -> None:
    """Logs where the memory differs from the configuration, and the notices of the start."""
    for notice in memory.notices:
        _log.warning("existing shared memory needs attention", what=notice)
    if memory.shortage:
        have_bytes = memory.superblock.limit_bytes
        _log.error("the ring stays smaller than configured", have_bytes=have_bytes, why=memory.shortage)


def _take_over(memory: Segments, store: StoreActor, policy: Replacement, scrub: Scrub) -> None:
    """Takes over the entries of a former daemon. If there are none, allocates the first piece of the ring."""
    ring_bytes = memory.superblock.ring_bytes
    if not memory.recovered:
        ready = memory.grow(0, prefault=False)
        store.inbox.tell_now(RingGrown(ready, more=ready < ring_bytes))
        return

    def taken_over() -> None:
        learned.load(memory, policy)
        scrub.begin()

    store.recover(taken_over)
    store.inbox.tell_now(RingGrown(memory.ready_bytes, more=memory.ready_bytes < ring_bytes))
