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
from itertools import count
from typing import Any, Final

import uvloop

from tensord import __version__

from ..errors import BadConfiguration, TensordError
from ..ipc.messages import control as messages
from ..ipc.wire.channel import AsyncChannel
from ..ipc.wire.connection import Connection
from ..ipc.wire.descriptors import peer_of
from ..shm.ring.layout import boot_s
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
from .process.limits import NO_MEMORY_OR_THREAD, limit_behind
from .remote_stores import threads as remote
from .remote_stores.store import open_store
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
LAG_EVERY_S: Final = 0.5
"""How often the lag of the event loop is measured."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the daemon until a signal ends it, or prints the text for `--help`, `--version` or `--check-config`. Returns
    the exit status: 0 after a clean stop, 2 for a wrong configuration, 1 for any other error that prevents serving."""
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


class _Daemon:
    def __init__(self, config: Config, argv: Sequence[str], environ: MutableMapping[str, str]) -> None:
        self._config = config
        self._argv = argv
        self._notifier = notify.Notifier(environ)
        self._activated = notify.listen_sockets(environ)
        self._environ: Mapping[str, str] = dict(environ)
        self._quotas = Quotas(quota_rules(config), os.geteuid(), config.quotas.requests_per_s_max)
        self._times = RequestTimes(config.log.slow_s)
        self._stop = asyncio.Event()
        self._drop = config.drop
        self._reload_asked = asyncio.Event()

    async def run(self) -> None:
        config, loop, began = self._config, asyncio.get_running_loop(), time.monotonic()
        # Before the sockets listen: whoever can connect takes the daemon for started, and may send signals.
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        loop.add_signal_handler(signal.SIGINT, self._stop_and_drop)
        loop.add_signal_handler(signal.SIGHUP, self._reload_asked.set)
        derived = frozenset(name for name in ("ring_bytes", "max_entries") if config.is_derived(name))
        memory = Segments(
            config.instance, ConfiguredSizes(config.ring_bytes, config.max_entries, NAMESPACES_MAX, derived)
        )
        # New memory is removed again if the daemon cannot listen: it is empty.
        drop = not memory.recovered
        try:
            with Sockets(config, self._activated) as sockets:
                drop = False
                await self._serve(memory, sockets, began)
        finally:
            memory.close(drop=drop or self._drop)
            self._notifier.close()

    def _stop_and_drop(self) -> None:
        self._drop = True
        self._stop.set()

    async def _serve(self, memory: Segments, sockets: Sockets, began: float) -> None:
        for notice in memory.notices:
            _log.warning("existing shared memory needs attention", what=notice)
        config, ring_bytes = self._config, memory.superblock.limit_bytes
        if memory.shortage:
            _log.error("the ring stays smaller than configured", have_bytes=ring_bytes, why=memory.shortage)
        watchers = Watchers()
        store, governor, pressure = self._actors(memory, watchers)
        scrub = Scrub(memory, store.inbox.tell_now, lambda: store.worked_at)
        store.scrub = scrub.add
        policy = store.core.policy
        if memory.recovered:
            governor.inbox.tell_now(governor_events.FormerDaemonFound())
        _take_over(memory, store, scrub)
        documents = Documents(store.inbox, governor.inbox, lambda: sockets.problems)
        sessions: set[Session] = set()
        clients = self._client_listener(memory, sockets, store, governor, sessions)
        readers = self._reader_listener(memory, sockets, documents, watchers)
        serving = asyncio.create_task(store.run())
        work = [
            clients.run(),
            readers.run(),
            governor.run(),
            pressure.run(),
            metrics_server(sockets.metrics, documents).run(),
            page_server(sockets.page, documents).run(),
            sockets.keep(),
            self._feed_watchdog(),
            self._reload_when_asked(memory, store, governor),
            _measure_lag(self._times),
            watch_stalls(pressure.sample_now, _log),
            self._grow(memory, store),
            scrub.run(),
            learned.keep_saving(memory, policy),
            _fail_with(serving),
        ]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each) for each in work]
            _log.info(
                "serving",
                instance=config.instance,
                socket=sockets.control.address,
                ring_bytes=ring_bytes,
                epoch=memory.superblock.epoch,
                recovered=memory.recovered,
                after_s=round(time.monotonic() - began, 3),
            )
            self._notifier.send(notify.READY, notify.status(f"serving {ring_bytes} bytes as {config.instance}"))
            await self._stop.wait()
            self._notifier.send(notify.STOPPING)
            _log.info("stopping", drop=self._drop)
            clients.stop_accepting()
            readers.stop_accepting()
            if not self._drop:
                await settle(sessions, store)
            for task in running:
                task.cancel()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        if not self._drop:
            learned.save(memory, policy.name, list(policy.learned()))

    def _actors(self, memory: Segments, watchers: Watchers) -> tuple[StoreActor, GovernorActor, PressureActor]:
        """The actors, connected to each other; the store is still without the entries of a former daemon."""
        config, superblock = self._config, memory.superblock
        core = Store(
            StoreMemory(memory.index, memory.index_memory, superblock.geometry, memory.ring_memory, memory.ready_bytes),
            config.policy,
            store_limits(config, superblock.limit_bytes, superblock.max_entries),
            superblock.epoch,
            seed=secrets.randbits(128),
            quotas=self._quotas,
        )
        core.parts.outbox.is_watched = lambda: watchers.are_told
        store = StoreActor(
            core,
            memory,
            config,
            clock=boot_s,
            tell_watchers=watchers.tell,
            tell_governor=lambda holds: governor.inbox.tell_now(holds),
            times=self._times,
            remote=None if config.remote.url is None else open_store(config.remote.url, config.remote.timeout_s),
        )
        gauges = open_gauges(config.gauges, _log)
        governor = GovernorActor(
            Governor(governor_limits(config)),
            clock=time.monotonic,
            tell_store=store.inbox.tell_now,
            reading=gauges.report,
            hasten=lambda: pressure.hasten(),
            tell_watchers=watchers.tell,
        )
        pressure = PressureActor(
            gauges,
            clock=time.monotonic,
            report=governor.inbox.tell_now,
            every_s=lambda: governor.sample_every_s,
        )
        return store, governor, pressure

    def _client_listener(
        self, memory: Segments, sockets: Sockets, store: StoreActor, governor: GovernorActor, sessions: set[Session]
    ) -> Listener:
        """Listens on the control socket. Keeps `sessions` current."""
        config, superblock = self._config, memory.superblock
        limits = wire_limits(config, superblock.limit_bytes)
        has_remote = config.remote.url is not None
        welcome = messages.Welcome(0, 0, __version__, config.instance, superblock.epoch, limits, has_remote)

        async def serve(number: int, accepted: socket.socket) -> None:
            channel = AsyncChannel(accepted, Connection.control_server(limits), read_bytes=READ_BYTES)
            inboxes, rates = (store.inbox, governor.inbox), self._quotas.rates
            session = Session(number, channel, peer_of(accepted), *inboxes, rates, self._times, welcome)
            sessions.add(session)
            try:
                await session.run()
            finally:
                sessions.discard(session)

        return Listener(sockets.control, "clients", self._quotas, serve)

    def _reader_listener(
        self, memory: Segments, sockets: Sockets, documents: Documents, watchers: Watchers
    ) -> Listener:
        limits = wire_limits(self._config, memory.superblock.limit_bytes)

        async def serve(number: int, accepted: socket.socket) -> None:
            channel = AsyncChannel(accepted, Connection.status_server(limits), read_bytes=READ_BYTES)
            uid, rates = peer_of(accepted).uid, self._quotas.rates
            await StatusSession(number, uid, channel, documents, watchers, rates, self._times).run()

        return Listener(sockets.status, "status_clients", self._quotas, serve)

    async def _reload_when_asked(self, memory: Segments, store: StoreActor, governor: GovernorActor) -> None:
        for number in count(1):
            await self._reload_asked.wait()
            self._reload_asked.clear()
            self._notifier.send(notify.reloading())
            verdict: dict[str, Any] = {"number": number, "at_unix_s": time.time()}
            try:
                found = self._config.reloaded(Config.load(self._argv, self._environ))
                # All checks come before the first change: a refused reload changes nothing.
                limits = store_limits(found.config, memory.superblock.limit_bytes, memory.superblock.max_entries)
                governors = governor_limits(found.config)
            except (BadConfiguration, OSError) as error:
                verdict |= {"refused": str(error), "applied": [], "waiting": []}
                store.inbox.tell_now(Reloaded(verdict))
            else:
                self._config = config = found.config
                self._quotas.change_limits(quota_rules(config), config.quotas.requests_per_s_max)
                logs.level(config.log.level)
                self._times.slow_s = config.log.slow_s
                governor.inbox.tell_now(governor_events.GovernorLimitsChanged(governors))
                verdict |= {"refused": "", "applied": found.applied, "waiting": found.waiting}
                store.inbox.tell_now(Reloaded(verdict, (config, limits)))
            self._notifier.send(notify.READY, notify.status(_log_reload(verdict)))

    async def _feed_watchdog(self) -> None:
        while self._notifier.watchdog_s is not None:
            self._notifier.send(notify.WATCHDOG)
            await asyncio.sleep(self._notifier.watchdog_s)

    async def _grow(self, memory: Segments, store: StoreActor) -> None:
        """Allocates and prefaults the rest of the ring piece by piece, while the first piece is in use."""
        ready, ring_bytes = memory.ready_bytes, memory.superblock.ring_bytes
        while ready < ring_bytes:
            how = self._config.memory
            try:
                ready = await asyncio.to_thread(memory.grow, ready, prefault=how.prefault, huge_pages=how.huge_pages)
            except (TensordError, *NO_MEMORY_OR_THREAD) as error:
                _log.error("the ring stays smaller than configured", have_bytes=ready, why=str(error))
                store.inbox.tell_now(RingGrown(ready, more=False, why=str(error)))
                return
            store.inbox.tell_now(RingGrown(ready, more=ready < ring_bytes))


def _take_over(memory: Segments, store: StoreActor, scrub: Scrub) -> None:
    """Takes over the entries of a former daemon. If there are none, allocates the first piece of the ring."""
    ready_bytes = memory.ready_bytes
    if memory.recovered:

        def taken_over() -> None:
            learned.load(memory, store.core.policy)
            scrub.begin()

        store.recover(taken_over)
    else:
        ready_bytes = memory.grow(0, prefault=False)
    store.inbox.tell_now(RingGrown(ready_bytes, more=ready_bytes < memory.superblock.ring_bytes))


def _log_reload(verdict: dict[str, Any]) -> str:
    """Logs the verdict of a reload. Returns one line for `systemctl status`."""
    number, applied, waiting = verdict["number"], verdict["applied"], verdict["waiting"]
    if verdict["refused"]:
        _log.error("reload failed; the configuration is unchanged", number=number, why=verdict["refused"])
        return f"reload {number} refused, the configuration is unchanged: {verdict['refused']}"
    for change in applied:
        _log.info("setting changed", **change)
    for change in waiting:
        _log.warning("setting needs a restart", **change)
    _log.info("reload applied", number=number, changed=len(applied), waiting=len(waiting))
    restart = f", {len(waiting)} need a restart" if waiting else ""
    return f"reload {number} applied: {len(applied)} settings changed{restart}"


async def settle(sessions: Collection[Session], store: StoreActor) -> None:
    """Waits until all requests that have arrived are carried out and answered, for ENDING_S_MAX at most: clients would
    treat stored puts without an answer as lost, or send them again."""
    for session in sessions:
        session.stop_reading()
    deadline = time.monotonic() + ENDING_S_MAX
    while not (store.settled and all(session.settled for session in list(sessions))) and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_EVERY_S)


async def _fail_with(serving: asyncio.Task[None]) -> None:
    """Ends the task group if the store actor ends, because the daemon cannot serve without it."""
    await asyncio.shield(serving)


async def _measure_lag(times: RequestTimes) -> None:
    while True:
        due = time.monotonic() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        times.lagged(time.monotonic() - due)
