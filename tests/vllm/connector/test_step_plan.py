"""What the workers of an engine are told for each step, and for how long entries are held for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensord.client.vllm.encoder import step_plan
from tensord.client.vllm.encoder.stats import LookupCounts
from tensord.client.vllm.encoder.step import NOTHING, Report, Save, StepMetadata
from tensord.client.vllm.encoder.step_plan import StepPlan

RING, ANOTHER = b"r" * 16, b"a" * 16


def lease(ring: bytes = RING) -> Any:
    """A lease on an output of 3 rows in `ring`."""
    return SimpleNamespace(tree=np.zeros((3, 4), np.float32), handle=lambda: ring + b"the place of a span")


def made(plan: StepPlan, tokens: int = 1) -> StepMetadata:
    plan.advance(tokens)
    return plan.make(rows=0)


def loading(plan: StepPlan, name: str = "a picture", ring: bytes = RING) -> StepMetadata:
    plan.allocate(name)
    plan.load(name, lease(ring))
    return made(plan)


@pytest.fixture
def plan() -> StepPlan:
    """Two ranks, which map one ring."""
    plan = StepPlan(2, LookupCounts())
    plan.take_in(Report(rings={0: RING, 1: RING}))
    return plan


def test_a_rank_that_is_many_steps_behind_is_taken_as_done(plan: StepPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_plan, "LAG_STEPS_MAX", 3)
    loading(plan)
    for _ in range(3):
        made(plan)
        assert len(plan) == 1
    made(plan)
    assert len(plan) == 0


def test_an_entry_is_sent_as_bytes_to_ranks_that_map_another_ring(plan: StepPlan) -> None:
    assert loading(plan).loads["a picture"].payload is None
    sent = loading(plan, ring=ANOTHER).loads["a picture"]
    assert sent.handle is None and sent.payload is not None and sent.shape == (3, 4)


def test_a_second_allocation_in_a_step_replaces_the_first(plan: StepPlan) -> None:
    plan.allocate("a picture")
    plan.save("a picture", save := Save(b"key", 3))
    assert plan.allocate("a picture") == save
    plan.load("a picture", lease())
    step = made(plan)
    assert list(step.loads) == ["a picture"]
    assert not step.saves


def test_an_allocated_input_is_in_the_encoder_cache_until_the_engine_drops_it(plan: StepPlan) -> None:
    plan.allocate("a picture")
    assert plan.is_local("a picture")
    assert made(plan) is NOTHING
    assert plan.is_local("a picture")
    plan.free(["a picture"])
    assert not plan.is_local("a picture")
