"""OpenTelemetry spans of calls, collected by the SDK's exporter in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import tensord
from tensord.client.core.client import Client

from ...daemon_process import PATIENCE_S, Daemon, some

KEY: Final = b"k" * 32
TREE: Final = np.arange(8)


@pytest.fixture(scope="module")
def provided() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    yield exporter
    exporter.shutdown()


@pytest.fixture
def exporter(provided: InMemorySpanExporter) -> InMemorySpanExporter:
    provided.clear()
    return provided


@pytest.fixture
def client(shared: Daemon, exporter: InMemorySpanExporter) -> Iterator[Client]:
    """A client of a daemon that has nothing, and no span yet."""
    with shared.client() as made:
        made.clear()
        exporter.clear()
        yield made


def told(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """By name: the spans that have ended, each once."""
    spans = exporter.get_finished_spans()
    by_name = {each.name: each for each in spans}
    assert len(by_name) == len(spans), [each.name for each in spans]
    return by_name


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_computation_is_a_span_with_its_wait_its_work_and_its_put(
    client: Client, exporter: InMemorySpanExporter
) -> None:
    client.get_or_compute(KEY, lambda: TREE)
    spans = told(exporter)
    whole = spans.pop("tensord.get_or_compute")
    assert attributes(whole) == {"tensord.key": KEY.hex()}
    assert set(spans) == {"tensord.wait", "tensord.compute", "tensord.put"}
    for each in spans.values():
        assert each.parent is not None and each.parent.span_id == whole.context.span_id


def test_a_put_is_a_span_with_its_state_many_are_one_span_and_a_hit_is_none(
    client: Client, exporter: InMemorySpanExporter
) -> None:
    client.put(KEY, TREE, wait=True)
    client.put_many([(bytes([number]) * 32, TREE) for number in range(3)], wait=True)
    assert client.get(KEY) is not None
    assert {name: attributes(each) for name, each in told(exporter).items()} == {
        "tensord.put": {"tensord.key": KEY.hex(), "tensord.put.state": "stored"},
        "tensord.put_many": {"tensord.puts": 3},
    }


def test_a_match_is_a_span_with_the_numbers_of_tokens(client: Client, exporter: InMemorySpanExporter) -> None:
    namespace = tensord.Namespace(model="m", revision="1", dtype="float32", processor="1")
    cache = tensord.PrefixCache(client, client.current(namespace), block_tokens=16)
    tokens = np.arange(64, dtype=np.uint32)
    layer = tensord.NormalLayer({"k": np.zeros((1, 1, 64, 2), np.float32)})
    cache.put(tokens, [layer], wait=True)
    exporter.clear()
    match = some(cache.match(tokens))
    with match:
        assert attributes(told(exporter)["tensord.match"]) == {"tensord.tokens": 64, "tensord.tokens.matched": 63}


def test_an_exception_is_recorded_in_its_span_and_raised(client: Client, exporter: InMemorySpanExporter) -> None:
    def fail() -> None:
        raise RuntimeError("no encoder")

    with pytest.raises(RuntimeError, match="no encoder"):
        client.get_or_compute(KEY, fail)
    whole = told(exporter)["tensord.get_or_compute"]
    assert not whole.status.is_ok
    assert [event.name for event in whole.events] == ["exception"]


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.sdk"])
def test_without_the_sdk_a_call_is_the_function_itself(missing: str) -> None:
    program = f"""
import sys
sys.modules[{missing!r}] = None
import tensord
assert not hasattr(tensord.Client.put, "__wrapped__")
assert not hasattr(tensord.AsyncClient.get_or_compute, "__wrapped__")
from tensord.client.computing.tracing import span
with span("nothing"):
    pass
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)
