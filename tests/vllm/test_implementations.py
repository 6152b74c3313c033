"""Two engines on one folder, of which one runs the model by vLLM's code and the other by that of transformers.

Their processors make items of other fields, and their encoders may make other numbers, of one picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, Final

import pytest

from tensord.shm.ring.layout import NAMESPACE_TAG_BYTES

from ..daemon_process import Daemon, until
from .conftest import StartEngine, fresh, keys
from .engine import Answer, Engine
from .tiny_families import FAMILIES

IMPLEMENTATIONS: Final = ("vllm", "transformers")
# The engines' own encoder caches have room for fewer.
MANY: Final = 32
# A frontend, a receiver, and what scheduler and worker of one process have in common: only with the connector.
CLIENTS: Final = 3
PATIENCE_S: Final = 20.0


@dataclass
class Pair:
    """Both engines of a family, by implementation, and what they said to three requests when there was no daemon."""

    engines: dict[str, Engine]
    pictures: tuple[int, int]
    right: dict[tuple[str, int | None], Answer]


def attached(running: Daemon, engine: Engine, clients: int) -> bool:
    rows = [row for row in running.client_rows() if row["pid"] == engine.pid and not row["orphaned"]]
    return len(rows) >= clients


def ask(engine: Engine, picture: int | None) -> Answer:
    return engine.generate() if picture is None else engine.generate(picture)


def started(family: str, folder: Path, start_engine: StartEngine, daemon: Daemon, **options: Any) -> dict[str, Engine]:
    """Both engines of a family, with the processor cache, on their way."""
    environ = {"TENSORD_VLLM_PROCESSOR_CACHE": "1", "TENSORD_SOCKET": str(daemon.socket)}
    a_picture = FAMILIES[family][1]
    return {
        name: start_engine(folder, environ=environ, a_picture=a_picture, model_impl=name, **options)
        for name in IMPLEMENTATIONS
    }


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def all_engines(
    running: Daemon, start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, dict[str, Engine]]]:
    """By family; and as "unnamed" two that call what their processors make the same."""
    folders = {family: write(tmp_path_factory.mktemp("family")) for family, (write, _) in FAMILIES.items()}
    with ExitStack() as stack:
        made = {
            family: started(family, folder, start_engine, running, socket=running.socket)
            for family, folder in folders.items()
        }
        made["unnamed"] = started("LLaVA", folders["LLaVA"], start_engine, running, unnamed=["model_impl"])
        for engines in made.values():
            for engine in engines.values():
                stack.enter_context(engine)
        yield made


@pytest.fixture(scope="module")
def pairs(running: Daemon, all_engines: dict[str, dict[str, Engine]]) -> dict[str, Pair]:
    """All, after each has answered without a daemon and forgotten the pictures."""
    made = {}
    for family, engines in all_engines.items():
        pictures = fresh(), fresh()
        right = {
            (name, picture): ask(engine, picture) for name, engine in engines.items() for picture in (*pictures, None)
        }
        made[family] = Pair(engines, pictures, right)
        for engine in engines.values():
            for _ in range(MANY // 2):
                engine.generate(fresh(), fresh(), tokens=1)
    running.start()
    for family, pair in made.items():
        for engine in pair.engines.values():
            clients = 2 if family == "unnamed" else CLIENTS
            until(partial(attached, running, engine, clients), f"{clients} clients of an engine of {family}")
    return made


@pytest.mark.parametrize("family", list(FAMILIES))
def test_engines_of_both_implementations_answer_as_without_tensord_and_share_nothing(
    running: Daemon, pairs: dict[str, Pair], family: str
) -> None:
    pair = pairs[family]
    before = keys(running)
    for picture, order in zip(pair.pictures, permutations(IMPLEMENTATIONS), strict=True):
        for name in order:
            engine, there = pair.engines[name], keys(running)
            assert ask(engine, picture) == pair.right[name, picture]
            until(
                lambda there=there: len(keys(running) - there) == 2,  # type: ignore[misc]
                "a processed item and an encoder's output under this engine's own names",
                PATIENCE_S,
            )
    assert len({key[:NAMESPACE_TAG_BYTES] for key in keys(running) - before}) == 4
    for name, engine in pair.engines.items():
        assert ask(engine, None) == pair.right[name, None]
        assert engine.ask("passed_through").get("mismatch", 0) == 0
        assert "Traceback" not in engine.log


def test_an_item_of_the_other_implementation_is_a_miss_even_under_the_same_name(
    running: Daemon, pairs: dict[str, Pair]
) -> None:
    pair = pairs["unnamed"]
    for picture, (first, second) in zip(pair.pictures, permutations(IMPLEMENTATIONS), strict=True):
        there = keys(running)
        assert ask(pair.engines[first], picture) == pair.right[first, picture]
        until(lambda there=there: len(keys(running) - there) == 1, "a processed item", PATIENCE_S)  # type: ignore[misc]
        assert ask(pair.engines[second], picture) == pair.right[second, picture]
        assert pair.engines[second].ask("passed_through")["mismatch"] == 1
    for name, engine in pair.engines.items():
        assert ask(engine, None) == pair.right[name, None]
        assert "Traceback" not in engine.log
