"""Two engines on one folder, of which one runs the model by vLLM's code and the other by that of transformers.

Their processors make items of other fields, and their encoders may make other numbers, of one picture.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tensord.shm.ring.layout import NAMESPACE_TAG_BYTES

from ..daemon_process import PATIENCE_S, Daemon, until
from .conftest import StartEngine, attached, fresh, keys
from .engine import Answer, Engine

IMPLEMENTATIONS: Final = ("vllm", "transformers")
# A frontend, a receiver, and what scheduler and worker of one process have in common: only with the connector.
CLIENTS: Final = 3


def answers_and_stores(engine: Engine, daemon: Daemon, picture: int, right: Answer) -> None:
    there = keys(daemon)

    def stored() -> bool:
        # On a busy machine it may have been too late to store something. Then it makes that once more.
        engine.ask("engine", method="reset_encoder_cache")
        assert engine.generate(picture) == right
        return len(keys(daemon) - there) == 2

    until(stored, "a processed item and an encoder's output under this engine's own names", 4 * PATIENCE_S)


def test_engines_of_both_implementations_answer_as_without_tensord_and_share_nothing(
    model: Path, start_engine: StartEngine
) -> None:
    with Daemon() as daemon, ExitStack() as stack:
        environ = {"TENSORD_VLLM_PROCESSOR_CACHE": "1", "TENSORD_SOCKET": str(daemon.socket)}
        options = {"socket": daemon.socket, "environ": environ}
        engines = {
            name: stack.enter_context(start_engine(model, model_impl=name, **options)) for name in IMPLEMENTATIONS
        }
        pictures = fresh(), fresh()
        right = {(name, picture): engines[name].generate(picture) for name in engines for picture in pictures}
        daemon.start()
        attached(daemon, *engines.values(), clients=CLIENTS)
        for picture, order in zip(pictures, (IMPLEMENTATIONS, IMPLEMENTATIONS[::-1]), strict=True):
            for name in order:
                answers_and_stores(engines[name], daemon, picture, right[name, picture])
        assert len({key[:NAMESPACE_TAG_BYTES] for key in keys(daemon)}) == 4
        assert not [name for name, engine in engines.items() if "Traceback" in engine.log]
