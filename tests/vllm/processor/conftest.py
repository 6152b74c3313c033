"""One daemon and one configuration of vLLM for the tests of each module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tensord.client.vllm import plugin
from tensord.client.vllm.processor.factories import _MAKES

from ...daemon_process import Daemon
from .stand import Pair


@pytest.fixture(scope="module")
def config(model: Path) -> VllmConfig:
    return EngineArgs(model=str(model), dtype="float32", max_model_len=256, enforce_eager=True).create_engine_config()


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon.start()


@pytest.fixture
def pair(config: VllmConfig, running: Daemon) -> Iterator[Pair]:
    made = Pair(config, running)
    yield made
    made.close()


@pytest.fixture
def vllm_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes, afterwards, what `install` replaces."""
    import vllm.renderers.base
    import vllm.v1.engine.core
    import vllm.v1.worker.worker_base  # noqa: F401
    from vllm.multimodal.hasher import MultiModalHasher
    from vllm.multimodal.processing.inputs import ProcessorInputs

    for module_name, module in list(sys.modules.items()):
        for name in _MAKES:
            if module_name.startswith("vllm.") and name in vars(module):
                monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(ProcessorInputs, "get_mm_hashes", ProcessorInputs.get_mm_hashes)
    monkeypatch.setattr(MultiModalHasher, "hash_kwargs", MultiModalHasher.hash_kwargs)


@pytest.fixture
def installed(vllm_as_it_was: None, monkeypatch: pytest.MonkeyPatch, running: Daemon) -> None:
    monkeypatch.setenv(plugin.PROCESSOR_CACHE, "1")
    monkeypatch.setenv("TENSORD_SOCKET", str(running.socket))
    plugin.register()
    plugin.register()
