"""LoRA adapters of the vision tower: what they are called follows from the weights that vLLM holds of them.

vLLM's own code loads the adapters from their folders; steps run without an engine, and one that begins with an adapter
is run by `Steps` as any other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from vllm.config.lora import LoRAConfig
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.v1.engine.core import EngineCore

from tensord.client.vllm.engine import adapters
from tests.daemon_process import Daemon, until

from ..step_bench import Steps, attached, feature, item, other_name, request, right
from .stand import fresh

RANK, WIDTH = 8, 64
MODULE = "multi_modal_projector.linear_1"
pytestmark = pytest.mark.usefixtures("patient")


def write_adapter(folder: Path, seed: int) -> Path:
    """An adapter's folder as PEFT saves it: its files have one size, whatever the seed."""
    folder.mkdir(exist_ok=True)
    numbers = np.random.default_rng(seed)
    shapes = {"A": (RANK, WIDTH), "B": (WIDTH, RANK)}
    tensors = {
        f"base_model.model.{MODULE}.lora_{name}.weight": numbers.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["linear_1"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    for file in folder.iterdir():
        os.utime(file, (0, 0))
    return folder


class Held:
    """vLLM's manager of a worker's adapters, as far as it loads them; nothing is put into a model's layers."""

    def __init__(self) -> None:
        self.models: dict[int, LoRAModel] = {}
        adapters.install()
        self._manager: Any = WorkerLoRAManager.__new__(WorkerLoRAManager)
        self._manager.__dict__.update(
            _lora_model_cls=LoRAModel,
            lora_config=LoRAConfig(max_lora_rank=RANK, lora_dtype=torch.float32),
            vocab_size=320,
            max_position_embeddings=256,
            _adapter_manager=SimpleNamespace(
                supported_lora_modules=["linear_1"],
                packed_modules_mapping={},
                model=torch.nn.Module(),
                moe_ep_load_spec=None,
                _validate_moe_lora_format=lambda _: None,
                _validate_modules_to_save=lambda _: None,
                _validate_token_classification_lora=lambda _: None,
                list_adapters=lambda: dict(self.models),
            ),
        )

    def load(self, folder: Path) -> LoRARequest:
        """Loads an adapter that the process has not, and gives the request that names it."""
        asked = LoRARequest("adapter", fresh(), str(folder))
        self.load_again(asked)
        return asked

    def load_again(self, asked: LoRARequest) -> None:
        self.models[asked.lora_int_id] = self._manager._load_adapter(asked)


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def pair(shared: Daemon) -> Iterator[tuple[Steps, Steps]]:
    """Two engines that run the tower with adapters."""
    with (
        Steps(shared.socket, change=tower) as one,
        Steps(other_name(shared.socket, 1), change=tower) as another,
    ):
        yield attached(one), attached(another)


def tower(config: Any) -> None:
    config.lora_config = LoRAConfig(enable_tower_connector_lora=True)


def encodes(engine: Steps, number: int, lora_request: LoRARequest | None = None) -> bool:
    """Has it answer a request with this picture, returns when it is stored, and says whether the engine encoded it."""
    engine.step()  # what workers hold is said at a step's end
    name = f"input-{fresh()}"
    asked = request(feature(item(number), name), lora_request=lora_request)
    assert right([asked], engine.run(asked))
    until(lambda: engine.step() is not None and not any(engine.held.values()), "nothing to be held")
    return name in engine.encoded


def test_engines_share_what_one_encoded_with_an_adapter_of_the_same_weights(
    pair: tuple[Steps, Steps], held: Held, tmp_path: Path
) -> None:
    one, another = pair
    picture = fresh()
    first, second = (write_adapter(tmp_path / str(seed), seed) for seed in (1, 2))
    for folder in (first, second):
        assert encodes(one, picture, held.load(folder))
    assert encodes(one, picture)
    for folder in (first, second, write_adapter(tmp_path / "elsewhere", 1)):
        assert not encodes(another, picture, held.load(folder))
    assert not encodes(another, picture)


def test_an_adapter_whose_folder_was_overwritten_keeps_the_name_of_what_was_loaded(
    pair: tuple[Steps, Steps], held: Held, tmp_path: Path
) -> None:
    one, another = pair
    picture = fresh()
    loaded = held.load(write_adapter(tmp_path / "adapter", 3))
    write_adapter(tmp_path / "adapter", 4)
    assert encodes(one, picture, loaded)
    assert encodes(another, picture, held.load(tmp_path / "adapter"))
    assert not encodes(another, picture, held.load(write_adapter(tmp_path / "as before", 3)))


def test_an_adapter_that_is_loaded_anew_has_another_name_though_its_files_have_their_size_and_times(
    pair: tuple[Steps, Steps], held: Held, tmp_path: Path
) -> None:
    one, another = pair
    picture = fresh()
    loaded = held.load(write_adapter(tmp_path / "adapter", 5))
    assert encodes(one, picture, loaded)
    write_adapter(tmp_path / "adapter", 6)
    held.load_again(loaded)
    assert encodes(one, picture, loaded)
    assert not encodes(another, picture, loaded)


def test_an_encoding_with_an_adapter_loaded_after_its_naming_is_not_stored(
    pair: tuple[Steps, Steps], held: Held, tmp_path: Path
) -> None:
    one, another = pair
    picture = fresh()
    loaded = held.load(write_adapter(tmp_path / "adapter", 7))
    one.step()
    asked = one.add(request(feature(item(picture), "replaced"), lora_request=loaded))
    write_adapter(tmp_path / "adapter", 8)

    def encoded() -> bool:
        made = one.schedule()
        scheduled = asked.request_id in made.scheduled_encoder_inputs
        if scheduled:
            held.load_again(loaded)
        _, said = one.execute(made)
        one.update(made, said)
        return scheduled

    until(encoded, "the step that encodes it")
    one.finish(asked)
    until(lambda: one.step() is not None and not any(one.held.values()), "nothing to be held")
    assert one.encoded == ["replaced"]
    for folder in (tmp_path / "adapter", write_adapter(tmp_path / "as before", 7)):
        assert encodes(another, picture, held.load(folder))


@pytest.mark.parametrize("how", ["add_lora", "remove_lora"])
def test_an_adapter_that_the_engine_loads_on_request_has_its_name_at_once(
    pair: tuple[Steps, Steps], held: Held, tmp_path: Path, how: str
) -> None:
    one, another = pair
    picture = fresh()
    loaded = held.load(write_adapter(tmp_path / "adapter", 10))
    assert encodes(one, picture, loaded)
    assert not encodes(another, picture, loaded)
    write_adapter(tmp_path / "adapter", 11)

    def loads(_: object) -> None:
        held.load_again(loaded)

    core: Any = EngineCore.__new__(EngineCore)
    core.scheduler = SimpleNamespace(ec_connector=another.connector)
    core.model_executor = SimpleNamespace(
        collective_rpc=lambda method: [method(None)], add_lora=loads, remove_lora=loads
    )
    side = another.connector._scheduler
    assert side is not None
    before = dict(side._adapters.held)
    getattr(core, how)(loaded)
    assert side._adapters.held == {0: adapters.held()} != before
    asked = another.add(request(feature(item(picture), "anew"), lora_request=loaded))
    until(lambda: asked.request_id in another.step(), "the answer")
    another.finish(asked)
    assert another.encoded == ["anew"]


def test_adapters_that_differ_between_workers_are_not_shared(
    shared: Daemon, pair: tuple[Steps, Steps], held: Held, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "adapter", 9)
    loaded = held.load(folder)
    in_place = LoRARequest("adapter", loaded.lora_int_id, str(folder), load_inplace=True)
    for asked in (LoRARequest("adapter", fresh(), str(folder)), in_place):
        picture = fresh()
        assert encodes(pair[0], picture, asked)
        assert encodes(pair[1], picture, asked)
    with Steps(other_name(shared.socket, 2), change=tower, ranks=2) as ranks:
        second = ranks.workers[1]._worker
        assert second is not None
        second._adapters = lambda: {loaded.lora_int_id: "another"}
        attached(ranks)
        picture = fresh()
        assert encodes(ranks, picture, loaded)
        assert encodes(ranks, picture, loaded)
