"""The checks of the KV connector on a real card run here on a stand-in."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tensord.client.gpu.torch_blocks import TorchBlocks

from ...client.device.standin import Accelerator
from ...daemon_process import MIB
from .worker_stand import whole_daemon

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
HOLD_S = 0.5


@pytest.fixture
def gpu_kv(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu import kv as gpu_kv

    monkeypatch.setattr(gpu_kv, "LAYERS", 8)
    yield gpu_kv
    for name in ("gpu.kv", "gpu.card", "gpu"):
        sys.modules.pop(name, None)


def kv_card(gpu_kv: Any, card: Accelerator) -> Any:
    def hold() -> None:
        threading.Timer(HOLD_S, card.hold().release).start()

    def memory() -> list[torch.Tensor]:
        shape = (gpu_kv.BLOCKS, gpu_kv.PAGE_BYTES)
        return [card.empty(shape, torch.int8).random_(-128, 128) for _ in range(gpu_kv.LAYERS)]

    return gpu_kv.KVCard(
        memory(),
        memory(),
        TorchBlocks(0, card.swap_blocks_batch, accelerator=card, driver=card.driver),
        TorchBlocks(0, card.swap_blocks_batch, accelerator=card, driver=gpu_kv.RefusingDriver()),
        launch=card.launch,
        hold=hold,
        synchronize=lambda: card.default.belt.mark().wait(),
    )


def test_all_checks_run_on_a_stand_in_and_none_fails(gpu_kv: Any) -> None:
    report = gpu_kv.Report()
    with whole_daemon(64 * MIB) as daemon, daemon.client() as client:
        assert client.wait_connected(30)
        gpu_kv.check_card(report, str(daemon.socket), client, kv_card(gpu_kv, Accelerator(256 * MIB)), "KV")
    assert len(report.checks) == 18
    # None: the machine was so busy that a card's delay was over before the check.
    assert [check["check"] for check in report.checks if check["held"] is False] == []


def test_without_a_card_of_vllm_nothing_is_decided(gpu_kv: Any) -> None:
    report = gpu_kv.Report()
    gpu_kv.check_kv(report, "", None, torch, 0)
    (check,) = report.checks
    assert check["held"] is None
