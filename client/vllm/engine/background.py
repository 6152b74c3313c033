"""A thread for work that must not delay an engine's step: hashing, lookups, claims, puts.

Owns: the thread, its queue of jobs, and the process's client, which all connectors of one daemon share. Does not own:
the jobs' results. An error in a job is logged once of its kind, and does not end the thread.

Invariants: `post` and `late` never wait, even if the thread is blocked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, Final

from ....errors import TensordError
from ...core.client import Client
from ...reading.view import View
from ...threads.aside import aside
from .presence import Presence

JOBS_MAX: Final = 1024
LATE_S: Final = 0.25
"""Seconds for which anything waits for the thread or the daemon: for a job to end, for lookups, for an answer to a
claim, for digests. What takes longer is not shared."""
TIMEOUT_S: Final = 1.0
SOON_S: Final = 0.001
IDLE_S: Final = 0.5
PAUSE_S: Final = 0.0001
"""How long a step without tokens sleeps, so that the thread gets the interpreter to settle what requests wait for."""

Job = Callable[[Client], object]
_log = logging.getLogger("tensord")
_lock: Final = threading.Lock()
_clients: Final[dict[str | None, tuple[Client, Presence]]] = {}
_users: Final[Counter[str | None]] = Counter()


@contextmanager
def shared_client(socket: str | None, name: str) -> Iterator[Client]:
    """The process's client for the socket, made for its first user and closed after its last.

    `name` is the client's name if this is its first user. May take a second if the daemon does not answer.
    """
    with _lock:
        if not _users[socket]:
            made = Client(socket, name=name, timeout_s=TIMEOUT_S)
            _clients[socket] = made, Presence(made)
        _users[socket] += 1
        client, _ = _clients[socket]
    try:
        yield client
    finally:
        with _lock:
            _users[socket] -= 1
            last = not _users[socket]
            if last:
                del _clients[socket]
        if last:
            client.close()


class Background:
    """The thread. It runs jobs in order, and calls `tick` after each job and when idle.

    `client` is the process's client, None until the thread has made it.

    Args:
        client_name: the name that `tensorctl clients` shows.
        tick: periodic work; returns the seconds until its next call.
        failed: called for each error.
    """

    def __init__(
        self,
        socket: str | None,
        client_name: str,
        name: str,
        tick: Callable[[Client], float] = lambda client: IDLE_S,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._socket = socket
        self._client_name = client_name
        self._tick = tick
        self._failed = failed
        self.client: Client | None = None
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._busy_since = 0.0
        self._errors: set[tuple[str, type]] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread. Call it once `tick` may be called."""
        aside(self._thread.start)

    def post(self, job: Job) -> bool:
        """Queues a job. False if JOBS_MAX jobs are queued already, or the thread is closing."""
        if self._jobs.qsize() >= JOBS_MAX or self._closing:
            return False
        self._jobs.put(job)
        return True

    def post_end(self, job: Job) -> None:
        """Queues a job that gives a resource back, without a limit. There is at most one for each job of `post`."""
        self._jobs.put(job)

    def post_until_done(self, job: Job) -> None:
        """Queues a job as `post_end` does, again until the daemon has carried it out. Each time delays the jobs behind
        it."""

        def again(client: Client) -> None:
            try:
                job(client)
            except TensordError:
                self.post_end(again)
                time.sleep(IDLE_S)
                raise

        self.post_end(again)

    @property
    def connected(self) -> bool:
        """Whether the client is connected to a daemon that answers."""
        return self.client is not None and self.client.connected

    @property
    def view(self) -> View | None:
        """The shared memory that the client is attached to, for lookups in any thread."""
        return self.client.link.view if self.client is not None else None

    @property
    def late(self) -> bool:
        """Whether the present job has taken longer than LATE_S."""
        since = self._busy_since
        return since != 0.0 and time.monotonic() - since > LATE_S

    def close(self) -> None:
        """Ends the thread after the queued jobs. Waits at most two seconds. Idempotent."""
        if not self._closing:
            self._closing = True
            self._jobs.put(None)
            self._thread.join(2 * TIMEOUT_S)

    def _run(self) -> None:
        self._busy_since = time.monotonic()
        with shared_client(self._socket, self._client_name) as self.client:
            again_s = SOON_S
            while self._serve(self.client, again_s):
                self._busy_since = time.monotonic()
                again_s = self._guarded(self._tick, self.client) or IDLE_S

    def _serve(self, client: Client, within_s: float) -> bool:
        """Runs the next job, if there is one within so many seconds. False if there will be no more."""
        self._busy_since = 0.0
        try:
            job = self._jobs.get(timeout=within_s)
        except Empty:
            return True
        if job is not None:
            self._busy_since = time.monotonic()
            self._guarded(job, client)
        return job is not None

    def _guarded(self, call: Job, client: Client) -> Any:
        try:
            return call(client)
        except Exception as error:
            self._failed()
            kind = (getattr(call, "__qualname__", "job"), type(error))
            if kind not in self._errors:
                self._errors.add(kind)
                # The messages of tensord's errors are complete; others come with their traceback.
                trace = None if isinstance(error, TensordError) else error
                _log.warning("tensord: %s; the tensor concerned is not shared", error, exc_info=trace)
            return None
