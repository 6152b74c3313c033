"""These tests need vLLM: `make test-vllm` installs it and runs them.

One daemon and three engines of one tiny model serve all tests with engines, since an engine takes ten seconds to start.
A test takes pictures that nobody asked for before, and may do to the daemon what it likes: the next one finds it
running, with all engines attached.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import tensord
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.schema import ENTRIES_MAX

from ..daemon_process import PATIENCE_S, Daemon, until
from .engine import Answer, Engine
from .tiny_llava import write_tiny_llava

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
# Their own conftest.py needs vLLM.
collect_ignore = [] if find_spec("vllm") else ["connector", "kv", "processor"]

StartEngine = Callable[..., Engine]

_pictures = count(1)


def fresh() -> int:
    """A picture that no engine has seen."""
    return next(_pictures)


@pytest.fixture(autouse=True)
def librarys_log_goes_where_pytest_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within vLLM the library's log is a part of vLLM's, which keeps its lines to itself."""
    monkeypatch.setattr(logging.getLogger("tensord"), "parent", logging.root)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other things makes nobody late here, nor another engine slower than one's own."""
    monkeypatch.setattr("tensord.client.vllm.engine.background.LATE_S", PATIENCE_S)
    monkeypatch.setattr("tensord.client.vllm.encoder.scheduler.LATE_S", PATIENCE_S)
    monkeypatch.setattr("tensord.client.vllm.encoder.pace.WAIT_S_LEAST", PATIENCE_S)
    monkeypatch.setattr("tensord.client.vllm.encoder.pace.SOONER", 0.0)


def keys(daemon: Daemon) -> set[bytes]:
    """The keys of all entries."""
    rows = daemon.ask(partial(messages.EntriesQuery, count=ENTRIES_MAX))["entries"]
    assert len(rows) < ENTRIES_MAX, "more entries than one page has"
    return {bytes.fromhex(row["key"]) for row in rows}


def attached(daemon: Daemon, *engines: Engine, clients: int = 1) -> None:
    """Returns when each of the engines is the daemon's client, in so many places."""

    def there() -> bool:
        sessions: Counter[int] = Counter()
        for pid in [row["pid"] for row in daemon.client_rows() if not row["orphaned"]]:
            # All of an engine's processes have one session in common.
            with contextlib.suppress(ProcessLookupError):
                sessions[os.getsid(pid)] += 1
        return all(sessions[engine.pid] >= clients for engine in engines)

    until(there, f"{clients} clients in each of {len(engines)} engines")


@dataclass
class Stand:
    """A daemon, two engines of one model that use it, and one of the same model that does not.

    Attributes:
        first, second: they have the connector.
        plain: has it not; its answers are what the others' have to be.
    """

    daemon: Daemon
    first: Engine
    second: Engine
    plain: Engine

    def keys(self) -> set[bytes]:
        """The keys of all entries."""
        return keys(self.daemon)

    def encode(self, engine: Engine, picture: int, uuids: list[str] | None = None) -> tuple[Answer, bytes]:
        """Has the engine encode a fresh picture, and returns when all can have it: its answer and the entry's key."""
        self.quiet()
        there = self.keys()
        answer = engine.generate(picture, uuids=uuids)
        new = until(lambda: self.keys() - there, f"an entry for picture {picture}")
        assert len(new) == 1
        return answer, new.pop()

    def attached(self, *engines: Engine, clients: int = 1) -> None:
        attached(self.daemon, *engines, clients=clients)

    def quiet(self) -> None:
        """Returns when all that engines encoded is stored: until then they have its claim."""
        self.daemon.until(lambda status: not status["store"]["claims_held"], "what engines encoded is stored")

    def unpinned(self) -> None:
        """Returns when no engine holds anything."""
        self.daemon.until(lambda status: status["pins"] == 0, "engines give back what they held")

    def mended(self) -> None:
        """The daemon runs, and the engines know it."""
        if self.daemon.running:
            self.daemon.resume()
        else:
            self.daemon.start()
        self.attached(self.first, self.second)


@contextlib.contextmanager
def encoding(engine: Engine) -> Iterator[Callable[[], int]]:
    """Counts what the engine encodes within, and after, the `with`."""
    before = engine.encoded()
    yield lambda: engine.encoded() - before


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder."""
    return write_tiny_llava(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def start_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartEngine]:
    """Starts engines, `Engine` without its `log`, and ends them at the end."""
    folder = tmp_path_factory.mktemp("engines")
    numbers = count(1)
    with contextlib.ExitStack() as started:

        def start(model: Path, **options: Any) -> Engine:
            return started.enter_context(Engine(model, folder / f"{next(numbers)}.log", **options))

        yield start


@pytest.fixture(scope="session")
def session_stand(model: Path, start_engine: StartEngine) -> Iterator[Stand]:
    with Daemon() as daemon:
        first, second = (start_engine(model, socket=daemon.socket) for _ in range(2))
        stand = Stand(daemon, first, second, start_engine(model))
        first.wait_up()  # without a daemon
        daemon.start()
        yield stand


@pytest.fixture
def stand(session_stand: Stand) -> Stand:
    """The engines and their daemon, ready. The engines were started before it."""
    session_stand.mended()
    return session_stand


@pytest.fixture
def client(stand: Stand) -> Iterator[tensord.Client]:
    """A client of the engines' daemon."""
    with tensord.Client(stand.daemon.socket) as attached:
        assert attached.wait_connected(30)
        yield attached
