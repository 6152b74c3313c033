"""A frontend and an engine core with vLLM's own classes around the processor cache, and items that they send."""

from __future__ import annotations

import hashlib
from itertools import count
from typing import Final

import torch
from vllm.config import VllmConfig
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.multimodal.processing import PromptReplacement

from tensord.client.vllm.processor.caches import TensordReceiverCache, TensordSenderCache
from tensord.client.vllm.processor.hashes import note

from ...daemon_process import PATIENCE_S, Daemon
from ..tiny_llava import IMAGE

UPDATES: Final = [PromptReplacement("image", [IMAGE], [IMAGE] * 4).resolve(0)]


_numbers = count(1)


class Pair:
    """One frontend and one engine core, as vLLM makes them; `more()` are further frontends."""

    def __init__(self, config: VllmConfig, daemon: Daemon) -> None:
        self._config, self._daemon = config, daemon
        self._senders: list[TensordSenderCache] = []
        self.p0 = self.more()
        self.p1 = TensordReceiverCache(config, daemon.socket)
        assert self.p1.cache._client.wait_connected(PATIENCE_S)

    def more(self) -> TensordSenderCache:
        sender = TensordSenderCache(self._config, self._daemon.socket)
        sender.cache._sender.wait_s = PATIENCE_S
        assert sender.cache._client.wait_connected(PATIENCE_S)
        self._senders.append(sender)
        return sender

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
        self.p1.cache._client.close()


def fresh() -> str:
    """A hash as vLLM takes it of content, that no test has used."""
    made = hashlib.sha256(f"{next(_numbers)}".encode()).hexdigest()
    note(made, follows=True)
    return made


def an_item(number: int = 1, size_bytes: int = 64 << 10) -> MultiModalKwargsItem:
    return MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(
                data=torch.full((size_bytes // 4,), float(number)), field=MultiModalBatchedField()
            ),
            "grid": MultiModalFieldElem(
                data=torch.tensor([[1, 2, number]]),
                field=MultiModalFlatField(slices=[slice(0, 1), slice(1, None, 1)], keep_on_cpu=True),
            ),
        }
    )


def is_whole(item: MultiModalKwargsItem | None) -> bool:
    return item is not None and "pixel_values" in item


def feature(hash: str, data: MultiModalKwargsItem | None, identifier: str | None = None) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=data, modality="image", identifier=identifier or hash, mm_position=PlaceholderRange(0, 4), mm_hash=hash
    )
