"""prefix_cached while the daemon is away, stopped, killed or emptied, in forks and in threads: what is generated
is right, and nothing is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensord
from tensord import NormalLayer, PrefixCache
from tensord.client.transformers import prefix_cached
from tensord.client.transformers.language import prefix
from tensord.client.transformers.language.caches import fill

from ...daemon_process import PATIENCE_S, Daemon, until
from ...processes import Child, Stage
from ..conftest import patient
from .language_models import PROMPT, generated, language_model, prompt, sharing

FAMILIES = ["llama", "gemma2", "qwen3_next"]
FOUND = 32
"""Tokens of the prompt that end a block."""


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    return language_model(request.param)


def empty(model: Any, client: tensord.Client) -> Any:
    """As `sharing`, with nothing stored."""
    return prefix_cached(model, client, block_tokens=16, snapshot_tokens=16)


def is_right(shared: Any, model: Any, **more: Any) -> bool:
    """Whether `shared` generates what the model does."""
    ids = prompt(10, 3, prompt(PROMPT))
    found = generated(shared, ids, **more)
    return torch.equal(found.sequences, generated(model, ids).sequences)


def on_step(step: int, act: Callable[[], object]) -> dict[str, Any]:
    """An argument of `generate` that has `act` called after so many forward passes."""
    steps = iter(range(1000))

    def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if next(steps) == step:
            act()
        return scores

    return {"logits_processor": [look]}


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_without_a_daemon_every_call_computes(model: Any, tmp_path: Path) -> None:
    with tensord.Client(tmp_path / "none.sock", timeout_s=0.2) as client:
        shared = empty(model, client)
        assert is_right(shared, model)
        assert is_right(shared, model)
        assert shared.flush()
        assert (shared.tally.found_tokens, shared.tally.dropped) == (0, 2)


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_a_daemon_that_is_killed_between_match_and_use_costs_nothing(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Daemon() as daemon:
        shared = sharing(model, daemon.start().client())

        def late(*args: Any) -> None:
            daemon.kill()
            fill(*args)

        monkeypatch.setattr(prefix, "fill", late)
        assert is_right(shared, model)
        assert shared.tally.found_tokens >= FOUND, "the pinned blocks were there although the daemon was not"


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_a_daemon_that_is_killed_while_a_model_generates_costs_what_would_have_been_stored(model: Any) -> None:
    with Daemon() as daemon:
        shared = sharing(model, daemon.start().client(timeout_s=PATIENCE_S))
        assert is_right(shared, model, **on_step(3, daemon.kill))
        assert is_right(shared, model)
        shared.flush(PATIENCE_S)
        # Until then it takes the ended connection for one to the next daemon.
        until(lambda: not shared._client.connected, "the client to notice the daemon's end")
        daemon.start()
        until(lambda: shared._client.connected, "the client to attach again")
        before = shared.tally.found_tokens
        assert is_right(shared, model)
        assert shared.tally.found_tokens >= before + FOUND, "the blocks outlived the daemon"


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_a_stopped_daemon_delays_a_call_and_no_more(model: Any) -> None:
    with Daemon() as daemon:
        shared = sharing(model, daemon.start().client(timeout_s=0.3))
        daemon.pause()
        try:
            assert is_right(shared, model)
            assert is_right(shared, model, **on_step(2, lambda: None))
        finally:
            daemon.resume()
        found = shared.tally.found_tokens
        until(lambda: is_right(shared, model) and shared.tally.found_tokens > found, "a hit, once the daemon goes on")


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_a_call_during_which_its_namespace_is_invalidated_is_right_and_stores_nothing(
    model: Any, client: tensord.Client
) -> None:
    shared = sharing(model, client)
    namespace = shared.namespace
    assert is_right(shared, model, **on_step(2, lambda: client.invalidate(namespace)))
    found = shared.tally.found_tokens
    assert found >= FOUND and shared.flush(PATIENCE_S)
    assert is_right(shared, model)
    assert shared.tally.found_tokens == found, "blocks of the former generation are found by nobody"
    assert shared.namespace.generation == namespace.generation + 1


def test_blocks_that_another_program_stored_under_the_name_are_not_used(client: tensord.Client) -> None:
    model = language_model("llama")
    shared = empty(model, client)
    shared.past_key_values(prompt(4))
    tokens = prompt(PROMPT)[0].numpy().astype(np.uint32)
    for layers in (
        [NormalLayer(np.ones((1, 2, PROMPT, 8), np.float32))],
        [NormalLayer({"keys": np.ones((1, 2, PROMPT, 8), np.float32)})] * 3,
        [NormalLayer({name: np.ones((2, 2, PROMPT, 8), np.float32) for name in ("keys", "values")})] * 3,
        [NormalLayer({name: np.ones((1, 2, PROMPT, 8), np.float32) for name in ("keys", "values")})] * 4,
    ):
        assert PrefixCache(client, shared.namespace, block_tokens=16).put(tokens, layers, wait=True).state == "stored"
        assert is_right(shared, model)
        assert shared.tally.found_tokens == 0
        client.clear()


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_threads_generate_what_one_after_the_other_would(model: Any, client: tensord.Client) -> None:
    shared = empty(model, client)
    prompts = [prompt(8, seed, prompt(PROMPT)) for seed in range(2, 6)]
    wanted = [generated(model, ids).sequences for ids in prompts]
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        torch.set_num_threads(1)
        for _ in range(3):
            found[number] = generated(shared, prompts[number]).sequences
            shared.flush(PATIENCE_S)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[number], sequences) for number, sequences in enumerate(wanted))
    assert shared.tally.calls == 12 and shared.tally.passed == 0, shared.tally.reasons
    assert shared.tally.found_tokens > 0


# ---- processes


def generates(stage: Stage, socket: Path, family: str) -> None:
    patient(pytest.MonkeyPatch())
    torch.set_num_threads(1)
    model = language_model(family)
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    shared = empty(model, client)
    stage.tell("ready")
    stage.hear()
    right = is_right(shared, model)
    stage.tell((right, shared.flush(PATIENCE_S), dict(shared.tally.reasons)))
    stage.hear()
    right = is_right(shared, model)
    stage.tell((right, shared.tally.found_tokens))


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_two_processes_that_compute_one_prompt_at_once_are_both_right_and_store_it_once(
    family: str, daemon: Daemon, client: tensord.Client
) -> None:
    with Child(generates, daemon.socket, family) as one, Child(generates, daemon.socket, family) as another:
        for child in (one, another):
            assert child.hear(120) == "ready"
        for _ in range(2):
            for child in (one, another):
                child.tell()
            heard = [child.hear() for child in (one, another)]
        assert all(right and found >= FOUND for right, found in heard)
    assert client.status()["store"]["entries"] <= 12
