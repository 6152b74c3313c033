"""These tests need transformers and torch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

import tensord

from ..daemon_process import PATIENCE_S, Daemon

if TYPE_CHECKING:
    from .vision_models import Family, Watch

collect_ignore_glob = [] if find_spec("transformers") else ["*test_*.py"]
_LIMITS = (
    "link.absence.WORD_S",
    *(f"transformers.calls.{name}" for name in ("_ANSWER_S", "_PUT_S", "_STORED_S")),
    *(f"transformers.language.prefix.{name}" for name in ("_MATCH_S", "_PUT_S")),
)


def patient(patch: pytest.MonkeyPatch) -> None:
    """A daemon that a busy machine delays is waited for, in this process."""
    for name in _LIMITS:
        patch.setattr(f"tensord.client.{name}", PATIENCE_S)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    patient(monkeypatch)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(ring_bytes="64MiB", gauges_host="none") as running:
        yield running.start()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[tensord.Client]:
    """With an empty cache, once nothing that an earlier test has begun is under way."""
    client = daemon.client(timeout_s=PATIENCE_S)
    daemon.until(lambda status: status["clients"] == 1, "earlier tests' clients to go")
    client.clear()
    yield client
    client.close()


@pytest.fixture
def other_client(daemon: Daemon, client: tensord.Client) -> Iterator[tensord.Client]:
    """Another one beside `client`."""
    other = daemon.client(timeout_s=PATIENCE_S)
    yield other
    other.close()


@pytest.fixture(params=["clip tower", "clip", "siglip", "llava", "whisper", "qwen2", "qwen2.5", "qwen3"])
def family(request: pytest.FixtureRequest) -> Family:
    """Each family of encoders."""
    from .vision_models import FAMILIES

    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def llama() -> Any:
    from .language.language_models import language_model

    return language_model("llama")


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """A list of how many items enter a model's tower, call by call."""
    from .vision_models import on_entry

    def watched(family: Family, model: Any) -> list[int]:
        calls: list[int] = []
        on_entry(monkeypatch, family, model, lambda given: calls.append(len(given) // family.rows_per_item))
        return calls

    return watched


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    import torch

    with torch.no_grad():
        yield


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """For tiny models on busy cores, more take many times as long."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
