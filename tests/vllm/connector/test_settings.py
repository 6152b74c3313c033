"""Settings, roles, metrics, and the end of the connector."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.lora import LoRAConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.lora.request import LoRARequest

from tensord.client.vllm.connector import TensordECConnector
from tensord.client.vllm.engine.settings import KVSettings, Settings
from tensord.errors import BadConfiguration
from tests.daemon_process import Daemon, until

from ..conftest import fresh, keys
from ..step_bench import Steps, answers, feature, item, other_name, request, right
from .stand import counted, encode, finds, nothing_left, settled

pytestmark = pytest.mark.usefixtures("patient")
UNKNOWN = ("tensord", "tensord_socket", "Tensord.Socket", " tensord.socket", "tensord.sockets", "tensord.sockte")


@pytest.mark.parametrize(("stages", "version"), [(2, "0.32.0"), (1, "0.33.0")])
def test_an_engine_with_pipeline_parallelism_or_of_an_untested_version_shares_nothing(
    shared: Daemon, first: Steps, monkeypatch: pytest.MonkeyPatch, stages: int, version: str
) -> None:
    def staged(config: Any) -> None:
        config.parallel_config.pipeline_parallel_size = stages

    picture = encode(first)
    monkeypatch.setattr("vllm.__version__", version)
    with Steps(shared.socket, change=staged) as one:
        assert not finds(one, picture)
        assert one.connector._scheduler is None and one.workers[0]._worker is None


# ---- roles


def test_a_producer_stores_and_never_says_hit(shared: Daemon) -> None:
    picture = fresh()
    with (
        Steps(shared.socket, "ec_producer") as producer,
        Steps(other_name(shared.socket, 1), "ec_consumer") as consumer,
    ):
        producer.run(request(picture))
        nothing_left(producer)
        asked = request(picture)
        assert right([asked], consumer.run(asked))
        assert consumer.encoded == []
        # Under another name it is encoded again, for who asks; but not stored again.
        producer.run(request(feature(item(picture), "another name")))
        assert producer.encoded == [f"picture-{picture}", "another name"]
        assert counted(producer, "saves") == 1


def test_a_consumer_stores_nothing_keeps_no_claim_and_waits_for_a_producer(shared: Daemon) -> None:
    picture, new = fresh(), fresh()
    with (
        Steps(shared.socket, "ec_producer") as producer,
        Steps(other_name(shared.socket, 1), "ec_consumer") as consumer,
    ):
        there = keys(shared)
        consumer.has_blocks = False
        asked = consumer.add(request(new))
        settled(consumer, asked)
        shared.until(lambda status: not status["store"]["claims_held"], "what it was granted to be given back")
        consumer.has_blocks = True
        assert right([asked], answers([consumer], asked))
        consumer.finish(asked)
        nothing_left(consumer)
        assert keys(shared) == there
        settled(producer, producer.add(request(picture)))
        asked = consumer.add(request(picture))
        until(lambda: consumer.step() is not None and shared.store("claims_waiting"), "the consumer to wait")
        until(producer.step, "the picture to be encoded")
        assert right([asked], answers([consumer], asked))
        assert consumer.encoded == [f"picture-{new}"]


# ---- settings, metrics, the end


BOTH = (Settings, KVSettings)


@pytest.mark.parametrize(
    ("kinds", "key", "value", "said"),
    [
        (BOTH, "socket", "1", r"'socket' in {where} has no effect: write tensord\.socket$"),
        *((BOTH, name, "1", "ensord.* in {where} is unknown; there are tensord\\.socket, ") for name in UNKNOWN),
        (BOTH, "tensord.socket", "", r"tensord\.socket='' must be"),
        (BOTH, "tensord.revision", "\ud800", r"tensord\.revision='.ud800' must be"),
        (BOTH, "tensord.tenant", "a\0b", r"tensord\.tenant='a.x00b' must be"),
        (BOTH, "tensord.sleep_at", "full", r"tensord\.sleep_at='full' must be one of '', 'pressure', 'critical'"),
        (BOTH, "tensord.sleep_idle_s", -1, r"tensord\.sleep_idle_s=-1 must be seconds from 0 to 86400"),
        (BOTH, "tensord.sleep_idle_s", True, r"tensord\.sleep_idle_s=True must be seconds"),
        ([Settings], "tensord.wait_s_max", "long", r"tensord\.wait_s_max='long' must be seconds from 0 to 60"),
        ([Settings], "tensord.canary", 2, r"tensord\.canary=2 must be a share from 0 to 1"),
        ([KVSettings], "tensord.registered_bytes_max", 0.5, r"tensord\.registered_bytes_max=0\.5 must be a number of"),
        ([KVSettings], "tensord.canary", 1, r"'tensord\.canary' in {where} is unknown"),
    ],
)
def test_a_setting_that_is_none_is_named_when_the_engine_starts(kinds: Any, key: str, value: Any, said: str) -> None:
    for kind in kinds:
        with pytest.raises(BadConfiguration, match=said.format(where=kind.WHERE)) as refused:
            kind.read({key: value})
        str(refused.value).encode()


def test_settings_have_their_defaults_and_those_of_other_connectors_are_left_alone(shared: Daemon) -> None:
    others = {"shared_storage_path": "/tmp", "socket_timeout": 3}
    assert Settings.read({**others, "tensord.canary": 0}) == Settings(wait_s_max=2.0, canary=0)
    assert KVSettings.read(others) == KVSettings(registered_bytes_max=32 << 30, sleep_idle_s=30.0)
    with pytest.raises(BadConfiguration, match=r"tensord\.wait_ms"):
        Steps(shared.socket, wait_ms=3)


@pytest.mark.parametrize("difference", ["revision", "tenant"])
def test_engines_of_another_revision_or_tenant_share_nothing(shared: Daemon, difference: str) -> None:
    given: Any = {difference: "another"}
    with Steps(shared.socket) as one, Steps(other_name(shared.socket, 1), **given) as another:
        assert not finds(another, encode(one))


def test_a_request_with_a_lora_adapter_of_the_tower_shares_nothing(shared: Daemon) -> None:
    def tower(config: Any) -> None:
        config.lora_config = LoRAConfig(enable_tower_connector_lora=True)

    picture = fresh()
    with Steps(shared.socket, change=tower) as one:
        for name, adapter in (("plain", None), ("adapted", LoRARequest("adapter", 1, "/nowhere"))):
            asked = request(feature(item(picture), name), lora_request=adapter)
            assert right([asked], one.run(asked))
            until(lambda: one.step() is not None and not any(one.held.values()), "nothing to be held")
        assert one.encoded == ["plain", "adapted"] and counted(one, "saves") == 1


def test_models_with_an_encoder_and_a_decoder_are_left_alone(shared: Daemon) -> None:
    config = SimpleNamespace(
        ec_transfer_config=SimpleNamespace(is_ec_producer=True, is_ec_consumer=True, ec_connector_extra_config={}),
        model_config=SimpleNamespace(is_encoder_decoder=True),
    )
    for role in ECConnectorRole:
        connector = TensordECConnector(config, role)
        assert connector.ensure_cache_available(request(1), 0)
        assert not connector.has_cache_item("picture-1")
        connector.save_caches({}, "picture-1")
        connector.shutdown()


def test_shutting_down_twice_leaves_no_thread_and_no_client(shared: Daemon) -> None:
    before, rows = set(threading.enumerate()), len(shared.client_rows())
    engine = Steps(other_name(shared.socket, 2))
    encode(engine)
    assert len(shared.client_rows()) > rows
    for _ in range(2):
        engine.close()
        until(lambda: not set(threading.enumerate()) - before, "the threads to be gone")
    until(lambda: len(shared.client_rows()) <= rows, "the client to be gone")
