"""vLLM's own tests of scheduler, encoder cache manager and multimodal cache pass with our classes in place of its own.

`make test-vllm` fetches them (benchmarks/vllm_cpu/tests.sh). They run in a process of their own, with their_plugin.py.
The models that they name are tiny ones, which stand in a cache of the hub's form.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import pytest

from ..daemon_process import Daemon
from .tiny_llava import write_tiny_llava

THEIRS: Final = Path(sys.prefix) / "vllm-tests"
PATIENCE_S: Final = 3600.0
SNAPSHOT: Final = "0" * 40
PICTURES: Final = ("llava-hf/llava-1.5-7b-hf", "llava-hf/llava-onevision-qwen2-0.5b-ov-hf")
SIDE: Final = 336
"""Of a picture: 576 tokens, as the tests expect of LLaVA."""
TEXT: Final = "facebook/opt-125m"
# Of the multimodal cache's: what is not asked of ours, by why.
NOT_OURS: Final = {
    "it reads the LRU cache's own dict": (
        "test_cache_eviction_lru_cache",
        "test_mm_cache_miss_batches_all_drifted_hashes",
        "test_processor_cache_shared_across_loras",
        "test_receiver_cache_replaces_stale_item_when_payload_resent",
    ),
    "it expects an item to go whole at first and as nothing then, where ours goes as a reference both times": (
        "test_mm_cache_miss_raises_and_recovers",
        "test_oversized_item_is_served_uncached",
        "test_release_kv_cache_resends_mm_payload",
    ),
}

pytestmark = pytest.mark.skipif(not THEIRS.is_dir(), reason=f"no {THEIRS}: make test-vllm fetches vLLM's own tests")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache as the hub's client keeps it, with tiny models under the names of those that the tests use."""
    made = tmp_path_factory.mktemp("hub")
    for name in PICTURES:
        folder = write_tiny_llava(_snapshot(made, name))
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["max_position_embeddings"] = 4096
        config["vision_config"]["image_size"] = SIDE
        (folder / "config.json").write_text(json.dumps(config))
        pictures = json.loads((folder / "preprocessor_config.json").read_text())
        pictures |= {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
        (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
        tokenizer = (folder / "tokenizer.json").read_text()
    folder = _snapshot(made, TEXT)
    config = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "dtype": "float16", "hidden_size": 64}
    config |= {"ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 2048}
    config |= {"vocab_size": 50272, "word_embed_proj_dim": 64, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return made


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        yield running.start()


@pytest.mark.parametrize(
    ("file", "count"),
    [
        ("v1/core/test_encoder_cache_manager.py", 21),
        ("v1/core/test_scheduler.py", 208),
        ("multimodal/test_cache.py", 14),
    ],
    ids=["encoder cache manager", "scheduler", "multimodal cache"],
)
def test_vllms_own_tests_pass_with_our_classes(
    file: str, count: int, hub: Path, daemon: Daemon, tmp_path: Path
) -> None:
    report = tmp_path / "report.xml"
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("TENSORD_", "VLLM_", "PYTEST_"))
    }
    ours = {
        "HF_HUB_CACHE": str(hub),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).parent),
        "TENSORD_SOCKET": str(daemon.socket),
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    words = ["-p", "their_plugin", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, "--rootdir", str(THEIRS)]
    words += ["-q", "--junit-xml", str(report), f"tests/{file}"]
    words += [f"--deselect=tests/{file}::{name}" for names in NOT_OURS.values() for name in names]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=THEIRS,
        env={**environ, **ours},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ran.returncode == 0, ran.stdout[-8000:]
    assert _passed(report) == count, ran.stdout[-2000:]


def _snapshot(hub: Path, name: str) -> Path:
    model = hub / f"models--{name.replace('/', '--')}"
    folder = model / "snapshots" / SNAPSHOT
    folder.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(SNAPSHOT)
    return folder


def _passed(report: Path) -> int:
    """How many tests ran, and passed."""
    suite: Any = ElementTree.parse(report).getroot().find("testsuite")
    figures = {name: int(suite.get(name)) for name in ("tests", "errors", "failures", "skipped")}
    return 2 * figures["tests"] - sum(figures.values())
