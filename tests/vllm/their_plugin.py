"""A pytest plugin for vLLM's own tests: ours stand where vLLM's scheduler and its frontends make their own classes.

Owns: which class stands for which. Run by test_theirs.py, in a process of its own, before vLLM's tests are imported.

    TensordEncoderCacheManager     tensord's, in vLLM's scheduler and in its tests
    LruKeyReplicatedSenderCache    TensordSenderCache, of the daemon at $TENSORD_SOCKET
    LruKeyReplicatedReceiverCache  TensordReceiverCache
"""

from __future__ import annotations

import logging
import os
from itertools import count
from types import SimpleNamespace
from typing import Any, Final

import pytest
import vllm.multimodal.cache as multimodal
import vllm.v1.core.encoder_cache_manager as managers
from vllm.multimodal.cache import factories, lru

from tensord.client.arguments.namespace import Namespace
from tensord.client.vllm import TensordEncoderCacheManager
from tensord.client.vllm.processor import caches as ours

SECONDS: Final = 60.0
_numbers = count(1)
_namespaces: list[tuple[Any, Namespace]] = []


def _namespace(model_config: Any) -> Namespace:
    """One for each configuration object: vLLM's tests make some that are no whole ones, and expect an empty cache."""
    for known, namespace in _namespaces:
        if known is model_config:
            return namespace
    made = Namespace(model=f"theirs-{next(_numbers)}", revision=str(os.getpid()), dtype="any", processor="any")
    _namespaces.append((model_config, made))
    return made


def _part(model_config: Any) -> Any:
    """The part of an engine's configuration that ours read."""
    parallel = SimpleNamespace(data_parallel_rank=0, data_parallel_size=1)
    return SimpleNamespace(model_config=model_config, parallel_config=parallel, instance_id="theirs")


class Sender(ours.TensordSenderCache):
    """Made as vLLM makes its own."""

    def __init__(self, model_config: Any) -> None:
        super().__init__(_part(model_config), put_wait_s=SECONDS)
        assert self.cache._client.wait_connected(SECONDS)


class Receiver(ours.TensordReceiverCache):
    """Made as vLLM makes its own."""

    def __init__(self, model_config: Any) -> None:
        super().__init__(_part(model_config))
        assert self.cache._client.wait_connected(SECONDS)


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What vLLM's own conftest gives by this name, `caplog` that hears vLLM's log; the conftest is not loaded."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog


def pytest_configure() -> None:
    """Puts ours in their places."""
    managers.EncoderCacheManager = TensordEncoderCacheManager
    vars(ours)["processor_namespace"] = _namespace
    for module in (multimodal, factories, lru):
        module.LruKeyReplicatedSenderCache = Sender
        module.LruKeyReplicatedReceiverCache = Receiver
