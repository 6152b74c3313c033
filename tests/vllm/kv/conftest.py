"""One daemon and three engines of one tiny model serve the tests of shared KV. Each test takes a text that nobody has
asked before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import tensord

from ...daemon_process import Daemon
from ..conftest import Stand, StartEngine
from ..engine import Answer, Engine
from ..tiny_llava import WIDTH, write_tiny_llava

StartEngines = Callable[..., AbstractContextManager[list[Engine]]]
BLOCK_TOKENS: Final = 32
BLOCK_BYTES: Final = BLOCK_TOKENS * 2 * 2 * WIDTH * 4
"""Of two layers' keys and values, each of WIDTH float32 numbers for a token."""
OPTIONS: Final[dict[str, Any]] = {
    "enable_prefix_caching": True,
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "block_size": BLOCK_TOKENS,
}
_texts = count(1)


def fresh_text(characters: int = 640) -> str:
    """A text that no engine has seen, of so many tokens: the model has one for each letter."""
    start = f"{next(_texts)}: "
    return start + ("You answer in few words. " * (characters // 25 + 1))[: characters - len(start)]


def with_kv(socket: Path, **extra: Any) -> dict[str, Any]:
    """The options of an engine with the KV connector. `extra`: more keys of kv_connector_extra_config."""
    transfer = {
        "kv_connector": "TensordKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tensord.socket": str(socket), **extra},
    }
    return {"kv_transfer_config": transfer, **OPTIONS}


def asked(engine: Engine, *pictures: int, **about: Any) -> tuple[Answer, int]:
    """What the engine says, and how many tokens it computed for it."""
    before = engine.ask("computed")
    answer = engine.generate(*pictures, **about)
    return answer, engine.ask("computed") - before


class KVStand(Stand):
    """A daemon, two engines with the KV connector, and one without."""

    def store(self, engine: Engine, *pictures: int, **about: Any) -> tuple[Answer, set[bytes]]:
        """Has the engine answer a fresh prompt, and returns when its blocks are stored: the answer and their keys."""
        there = self.keys()
        answer = engine.generate(*pictures, **about)
        self.settled(engine)
        new = self.keys() - there
        assert new, f"no block was stored:\n{engine.log[-2000:]}"
        return answer, new

    def settled(self, *engines: Engine) -> None:
        """Returns when these engines have nothing to load or store, and hold nothing."""
        for engine in engines:
            engine.ask("settle")
        self.daemon.until(
            # It is answered after the records of all that was put before.
            lambda status: not status["pins"],
            "blocks are stored, pins gone",
        )


@pytest.fixture(scope="session")
def kv_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for long prompts."""
    return write_tiny_llava(tmp_path_factory.mktemp("kv-model"), positions=1024)


@pytest.fixture(scope="session")
def kv_session(kv_model: Path, start_engine: StartEngine) -> Iterator[KVStand]:
    with Daemon() as daemon:
        first, second = (start_engine(kv_model, **with_kv(daemon.socket)) for _ in range(2))
        plain = start_engine(kv_model, **{**OPTIONS, "enable_prefix_caching": False})
        daemon.start()
        yield KVStand(daemon, first, second, plain)


@pytest.fixture
def kv(kv_session: KVStand) -> KVStand:
    """The engines and their daemon, ready. The ring is empty: it is too small for the blocks of all tests."""
    kv_session.first.wait_up()
    kv_session.second.wait_up()
    kv_session.mended()
    with tensord.Client(kv_session.daemon.socket, required=True) as attached:
        attached.clear()
    return kv_session


@pytest.fixture
def engines(kv: KVStand, start_engine: StartEngine) -> StartEngines:
    """Starts engines with options that are clients of the daemon: `clients` in each."""

    @contextmanager
    def start(model: Path, count: int = 1, *, clients: int = 1, **options: Any) -> Iterator[list[Engine]]:
        with ExitStack() as stack:
            started = [stack.enter_context(start_engine(model, **options)) for _ in range(count)]
            for engine in started:
                engine.wait_up()
            kv.attached(*started, clients=clients)
            yield started

    return start


@pytest.fixture
def client(kv: KVStand) -> Iterator[tensord.Client]:
    """A client of the engines' daemon."""
    with tensord.Client(kv.daemon.socket) as attached:
        assert attached.wait_connected(30)
        yield attached


def replace_all(client: tensord.Client, keys: set[bytes], make: Callable[[np.ndarray[Any, Any]], object]) -> None:
    """Replaces the entries by what `make` makes of them."""
    made = {}
    for key in keys:
        lease = client.get(key)
        assert lease is not None
        made[key] = make(lease.tree)
        del lease
    client.evict(*keys)
    for key, payload in made.items():
        assert client.put(key, payload, wait=True).state == "stored"
