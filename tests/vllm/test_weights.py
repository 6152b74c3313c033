"""Who hears that an engine's weights changed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor as TheirExecutor

from tensord.client.vllm.engine import weights


class Listener:
    def __init__(self) -> None:
        self.heard = 0
        self.resets = 0
        weights.listen_for_resets(self.changed)

    def changed(self, weights_kept: bool) -> None:
        self.resets += weights_kept
        self.heard += not weights_kept


@pytest.fixture
def listener() -> Listener:
    return Listener()


class Executor(TheirExecutor):  # type: ignore[misc, unused-ignore]
    """Says what reached the workers, and what a listener had heard by then."""

    is_sleeping: Any = property(lambda self: bool(self.sleeping_tags))

    def _init_executor(self) -> None:
        pass

    def check_health(self) -> None:
        pass

    def __init__(self, heard: Callable[[], int]) -> None:
        self.calls: list[tuple[Any, int]] = []
        self.model: torch.nn.Module = torch.nn.Linear(4, 4)
        self.heard = heard
        self.error: Exception | None = None
        self.sleeping_tags: set[str] = set()

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        if method is weights.weight_marks:
            return [method(self, *args)]
        self.calls.append((method, self.heard()))
        if callable(method):
            return [method(self)]
        if self.error is not None:
            raise self.error
        return [method]

    def get_model(self) -> torch.nn.Module:
        return self.model


@pytest.fixture
def core(listener: Listener) -> EngineCore:
    """The engine core's own methods, without the engine that it would start."""
    engine = EngineCore.__new__(EngineCore)
    engine.model_executor = Executor(lambda: listener.heard)
    return engine


def _adds(model: torch.nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters())[1, 2] += 1


def _writes_around_the_counter(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data + 1)


@pytest.mark.parametrize(
    ("method", "heard"),
    [
        ("update_weights", 1),
        ("reload_weights", 1),
        ("load_model", 1),
        ("an_extensions_method", 1),
        (lambda worker: _adds(worker.get_model()), 1),
        ("compute_weight_checksums", 0),
        ("profile", 0),
    ],
)
def test_a_call_that_may_have_changed_weights_is_noticed_after_the_workers_have_it(
    core: EngineCore, listener: Listener, method: Any, heard: int
) -> None:
    core.collective_rpc(method, None, ())
    assert core.model_executor.calls == [(method, 0)]
    assert listener.heard == heard
    if method == "update_weights":
        core.model_executor.error = RuntimeError("half way")
        with pytest.raises(RuntimeError, match="half way"):
            core.collective_rpc(method)
        assert listener.heard == 2, "it counts as a change though it failed"


@pytest.fixture
def started(core: EngineCore, listener: Listener) -> EngineCore:
    """The core after its start, with as much of a scheduler as a reset and a sleep need."""
    scheduler: Any = SimpleNamespace(
        reset_encoder_cache=lambda: None,
        has_unfinished_requests=lambda: False,
        finish_requests=lambda *_: None,
        set_pause_state=lambda _: None,
    )
    scheduler.kept = []
    scheduler.reset_prefix_cache = lambda *_: scheduler.kept.append(weights.weights_are_kept()) or True
    core.scheduler = scheduler
    core.mm_receiver_cache = None
    executor: Any = core.model_executor
    executor.init_ec_output_aggregator()
    return core


def test_a_reset_of_caches_with_the_weights_of_the_start_is_no_change(started: EngineCore, listener: Listener) -> None:
    started.reset_encoder_cache()
    started.pause_scheduler()
    assert (listener.heard, listener.resets > 0) == (0, True)
    assert started.scheduler.kept == [True], "the KV connector is told that the weights are kept"


@pytest.mark.parametrize("change", [_adds, _writes_around_the_counter])
def test_a_reset_after_a_change_around_vllms_methods_is_noticed_and_the_next_reset_is_none(
    started: EngineCore, listener: Listener, change: Any
) -> None:
    change(started.model_executor.model)
    started.pause_scheduler()
    assert listener.heard > 0
    assert started.scheduler.kept == [False]
    heard = listener.heard
    started.reset_encoder_cache()
    assert listener.heard == heard


def test_a_reset_counts_as_a_change_where_the_weights_of_the_start_are_not_known(
    started: EngineCore, listener: Listener
) -> None:
    del started.model_executor._tensord_marks
    started.reset_encoder_cache()
    assert listener.heard == 1
    started.model_executor.model = torch.nn.Linear(4, 4, device="meta")  # weights that cannot be read
    started.reset_encoder_cache()
    assert listener.heard == 2


@pytest.mark.parametrize(
    ("level", "change", "heard_asleep", "heard_awake"),
    [(0, False, 0, 0), (1, False, 0, 0), (1, True, 0, 1), (2, False, 1, 1)],
    ids=["paused", "kept", "others at the wake-up", "discarded"],
)
def test_a_sleep_is_a_change_if_it_discards_the_weights_or_they_are_others_at_the_wake_up(
    started: EngineCore, listener: Listener, level: int, change: bool, heard_asleep: int, heard_awake: int
) -> None:
    started.sleep(level)
    if level == 1:
        started.reset_encoder_cache()
    if change:
        _adds(started.model_executor.model)
    assert listener.heard == heard_asleep
    for tag in ("kv_cache", "weights"):
        started.wake_up([tag])
    assert (listener.heard, started.model_executor.sleeping_tags) == (heard_awake, set())
