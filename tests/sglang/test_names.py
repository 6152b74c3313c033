"""Which engines share pages, and which never do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.utils import storage_namespace_seed
from sglang.srt.server_args import ServerArgs

from tensord.client.checkpoints.loading import loading_begins
from tensord.client.identity.engine import Nameless
from tensord.client.sglang import names
from tensord.client.sglang.names import StorageSettings

from ..daemon_process import Daemon, until
from .conftest import write_model
from .rank import PAGE, Rank, mha_pool, mla_pool, page_hashes, storage_config


def _found(writer: Rank, reader: Rank) -> int:
    """How many of three pages that one rank stores the other one finds."""
    found: int = reader.storage.batch_exists(writer.stored()[0])
    return found


def _other_pool(*given: Any, **fields: Any) -> dict[str, Any]:
    return {"pool": lambda: mha_pool(*given, **fields)}


TOLD_APART: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "by another name": ({}, {"config": {"model_name": "by another name"}}, 3),
    "data parallel": ({}, {"config": {"dp_rank": 1}}, 3),
    "metrics": ({}, {"config": {"enable_storage_metrics": True}}, 3),
    "tp rank": ({"config": {"tp_size": 2}}, {"config": {"tp_size": 2, "tp_rank": 1}}, 0),
    "pp rank": ({"config": {"pp_size": 2}}, {"config": {"pp_size": 2, "pp_rank": 1}}, 0),
    "cp rank": ({"config": {"attn_cp_size": 2}}, {"config": {"attn_cp_size": 2, "attn_cp_rank": 1}}, 0),
    "tp size": ({}, {"config": {"tp_size": 2}}, 0),
    "pp size": ({}, {"config": {"pp_size": 2}}, 0),
    "cp size": ({}, {"config": {"attn_cp_size": 2}}, 0),
    "layout layer_first": ({}, _other_pool("layer_first"), 0),
    "layout page_first_direct": ({}, _other_pool("page_first_direct"), 0),
    "heads": ({}, _other_pool(heads=4), 0),
    "page size": ({}, _other_pool(page=2 * PAGE), 0),
    "dtype": ({}, _other_pool(dtype=torch.float16), 0),
    "mla": ({}, {"pool": mla_pool}, 0),
    "revision": ({}, {"extra": {"tensord.revision": "r2"}}, 0),
    "tenant": ({}, {"extra": {"tensord.revision": "r1", "tensord.tenant": "a"}}, 0),
}
"""What two ranks are made of, and how many of three pages of the first one the second one finds."""


@pytest.mark.parametrize("difference", TOLD_APART)
def test_ranks_share_pages_exactly_if_their_parts_of_the_model_their_pools_and_their_settings_agree(
    daemon: Daemon, difference: str
) -> None:
    *ranks, found = TOLD_APART[difference]
    writer, reader = (Rank(daemon.socket, **{**given, "pool": given.get("pool", mha_pool)()}) for given in ranks)
    assert _found(writer, reader) == found


# ---- the weights


def test_engines_that_load_the_same_bytes_share_pages_wherever_the_files_are(
    daemon: Daemon, model: Path, tmp_path: Path
) -> None:
    assert _found(_loaded(daemon, model), _loaded(daemon, write_model(tmp_path))) == 3


# The places are between those that a digest of an encoder's weights samples.
@pytest.mark.parametrize("place", [100_000, 600_000])
def test_one_other_byte_in_a_tensor_of_the_language_model_tells_engines_apart(
    daemon: Daemon, model: Path, tmp_path: Path, place: int
) -> None:
    assert _found(_loaded(daemon, model), _loaded(daemon, write_model(tmp_path, place))) == 0


def test_weights_that_changed_while_the_engine_was_starting_are_not_named(tmp_path: Path) -> None:
    # The tests' own process began before it wrote the model.
    write_model(tmp_path)
    with pytest.raises(Nameless, match="has changed since this process began"):
        names.weights_name(storage_config({}), StorageSettings(model=str(tmp_path)), {})


@pytest.mark.parametrize(
    ("model", "arguments", "told"),
    [
        ("no/such-model", {}, "not in files on this host; set tensord.model or tensord.revision"),
        ("", {}, "set tensord.revision"),
        ("no/such-model", {"load_format": "dummy"}, "load format dummy"),
        ("no/such-model", {"weight_cache_mode": "client"}, "from a weight cache"),
    ],
)
def test_weights_that_are_in_no_file_are_not_named(model: str, arguments: dict[str, Any], told: str) -> None:
    config = storage_config({}, model_name=model)
    with pytest.raises(Nameless, match=told):
        names.weights_name(config, StorageSettings(), arguments)


def test_an_engine_without_a_name_shares_nothing_and_says_so(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(daemon.socket, extra={}, named=False)
    until(lambda: "this engine shares no KV" in caplog.text, "the message")
    hashes, indices = rank.filled()
    assert rank.storage.batch_set_v1(hashes, indices) == [False] * 3
    assert rank.storage.batch_exists(hashes) == 0
    assert rank.storage.batch_get_v1(hashes, indices) == [False] * 3


def _loaded(daemon: Daemon, model: Path) -> Rank:
    """A rank of an engine that began to load the model's weights after they were written."""
    written_ns = max(path.stat().st_ctime_ns for path in model.iterdir())
    until(lambda: time.clock_gettime_ns(5) > written_ns, "the files' clock to go on")
    loading_begins(str(model))
    return Rank(daemon.socket, extra={"tensord.model": str(model)})


# ---- the engine's arguments


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes arguments those of the engine in this process."""

    def publish(**arguments: Any) -> None:
        given = ServerArgs(model_path="tiny", device="cpu", **arguments)
        monkeypatch.setattr(runtime_context._CONTEXT, "_server_args", given)

    return publish


CHANGE_KV: list[dict[str, Any]] = [
    {"quantization": "fp8"},
    {"kv_cache_dtype": "fp8_e5m2"},
    {"json_model_override_args": '{"rope_theta": 5}'},
    {"dtype": "float16"},
    {"model_impl": "transformers"},
    {"attention_backend": "triton"},
]
CHANGE_NOTHING: list[dict[str, Any]] = [
    {"port": 4},
    {"mem_fraction_static": 0.3},
    {"log_level": "debug"},
    {"served_model_name": "a"},
    {"random_seed": 3},
]


@pytest.mark.parametrize("argument", [*CHANGE_KV, *CHANGE_NOTHING], ids=str)
def test_an_argument_tells_engines_apart_exactly_if_it_changes_kv(
    daemon: Daemon, published: Callable[..., None], argument: dict[str, Any]
) -> None:
    published()
    first = Rank(daemon.socket)
    published(**argument)
    assert _found(first, Rank(daemon.socket)) == (0 if argument in CHANGE_KV else 3)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "adapters": ({"enable_lora": True}, {}, "LoRA"),
    "a client's own hashes": ({"trust_mm_content_hashes": True}, {}, "--trust-mm-content-hashes"),
    "another draft model": ({"speculative_draft_model_path": "draft"}, {}, "the draft model draft"),
    "another file": ({"quantization_param_path": "scales.json"}, {}, "quantization_param_path"),
    "decode context parallelism": ({}, {"dcp_size": 2, "dcp_rank": 0, "logical_page_size": 2 * PAGE}, "dcp_size"),
    "pages as tensors": ({}, {"extra_config": {}}, 'set "interface_v1": 1'),
}


@pytest.mark.parametrize(("arguments", "fields", "told"), REFUSED.values(), ids=list(REFUSED))
def test_an_engine_with_an_input_that_no_name_covers_is_refused(
    published: Callable[..., None], arguments: dict[str, Any], fields: dict[str, Any], told: str
) -> None:
    published(**arguments)
    config = replace(storage_config({}, is_mla_model=True, tp_size=2), **fields)
    with pytest.raises(Nameless, match=told):
        names.weights_name(config, StorageSettings(revision="r1"), names.engine_arguments())


def test_another_release_of_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.__version__", "0.5.24")
    with pytest.raises(Nameless, match=r"0\.5\.24"):
        names.weights_name(storage_config({}), StorageSettings(revision="r1"), {})


# ---- what SGLang's own hash of a page covers, which no name of tensord repeats


TOKENS = list(range(8))


class Request(list[int]):
    """Tokens, with what a request says of them."""

    def __init__(self, tokens: list[int], extra_key: str | None = None, cache_salt: str | None = None) -> None:
        super().__init__(tokens)
        self.extra_key, self.cache_salt = extra_key, cache_salt


def test_sglangs_page_hash_covers_all_tokens_before_extra_key_and_salt() -> None:
    plain = page_hashes(Request(TOKENS))
    assert page_hashes(Request(TOKENS)) == plain
    assert page_hashes(Request([9, *TOKENS[1:]]))[1] != plain[1]
    others = [page_hashes(Request(TOKENS, "a")), page_hashes(Request(TOKENS, None, "a"))]
    assert len({*plain, *others[0], *others[1]}) == 6
    assert storage_namespace_seed(None, None) is None
