"""Two engines on one folder, of which one runs the model by vLLM's code and the other by that of transformers.

Their processors make items of other fields, and their encoders may make other numbers, of one picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import permutations
from typing import Final

import pytest

from tensord.shm.ring.layout import NAMESPACE_TAG_BYTES

from ..daemon_process import PATIENCE_S, Daemon, until
from .conftest import StartEngine, attached, fresh, keys
from .engine import Answer, Engine
from .tiny_gemma3 import write_tiny_gemma3
from .tiny_llava import write_tiny_llava

FAMILIES: Final = {
    "LLaVA": (write_tiny_llava, "<image> "),
    "Gemma 3": (write_tiny_gemma3, "<start_of_image>"),
}
"""By name: what writes a tiny model of the family into a folder, and how its prompts say "a picture"."""
IMPLEMENTATIONS: Final = ("vllm", "transformers")
# The engines' own encoder caches have room for fewer.
MANY: Final = 32
# A frontend, a receiver, and what scheduler and worker of one process have in common: only with the connector.
CLIENTS: Final = 3


Pairs = dict[str, tuple[dict[str, Engine], tuple[int, int], dict[tuple[str, int | None], Answer]]]
"""By family: both engines by implementation, two pictures, and what each engine said when there was no daemon."""


def ask(engine: Engine, picture: int | None) -> Answer:
    return engine.generate() if picture is None else engine.generate(picture)


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def pairs(running: Daemon, start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    """All, after each has answered without a daemon and forgotten the pictures."""
    environ = {"TENSORD_VLLM_PROCESSOR_CACHE": "1", "TENSORD_SOCKET": str(running.socket)}
    with ExitStack() as stack:
        engines: dict[str, dict[str, Engine]] = {}
        for family, (write, a_picture) in FAMILIES.items():
            folder = write(tmp_path_factory.mktemp("family"))
            options = {"socket": running.socket, "environ": environ, "a_picture": a_picture}
            engines[family] = {
                name: stack.enter_context(start_engine(folder, model_impl=name, **options)) for name in IMPLEMENTATIONS
            }
        made = {}
        for family, each in engines.items():
            pictures = fresh(), fresh()
            asked = [(name, picture) for name in each for picture in (*pictures, None)]
            made[family] = each, pictures, {about: ask(each[about[0]], about[1]) for about in asked}
            for engine in each.values():
                for _ in range(MANY // 2):
                    engine.generate(fresh(), fresh(), tokens=1)
        running.start()
        attached(running, *(engine for each in engines.values() for engine in each.values()), clients=CLIENTS)
        yield made


@pytest.mark.parametrize("family", list(FAMILIES))
def test_engines_of_both_implementations_answer_as_without_tensord_and_share_nothing(
    running: Daemon, pairs: Pairs, family: str
) -> None:
    engines, pictures, right = pairs[family]
    before = keys(running)
    for picture, order in zip(pictures, permutations(IMPLEMENTATIONS), strict=True):
        for name in order:
            engine, there = engines[name], keys(running)

            def stored(
                engine: Engine = engine, about: tuple[str, int] = (name, picture), there: set[bytes] = there
            ) -> bool:
                assert ask(engine, about[1]) == right[about]
                if len(keys(running) - there) == 2:
                    return True
                # On a busy machine it may have been too late to store something. Then it makes that once more.
                engine.ask("engine", method="reset_encoder_cache")
                return False

            until(stored, "a processed item and an encoder's output under this engine's own names", 4 * PATIENCE_S)
    assert len({key[:NAMESPACE_TAG_BYTES] for key in keys(running) - before}) == 4
    for name, engine in engines.items():
        assert ask(engine, None) == right[name, None]
        assert "Traceback" not in engine.log
