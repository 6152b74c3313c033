"""The pair matrix: two engines that differ in what may change an output have two names; in what does not, one.

Real configurations of a tiny model, made as vLLM makes them. What is said of encoders holds for what they make of what
they are given; what is said of processors, for what they make of a picture.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tensord.client.checkpoints.loading import loading_begins
from tensord.client.identity.engine import Nameless, encoder_namespace, processor_namespace

from .tiny_llava import WIDE, write_tiny_llava

PLAIN: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True}


def config(model: Path, **options: Any) -> VllmConfig:
    """The configuration of an engine on the folder, as vLLM makes it."""
    return EngineArgs(**{"model": str(model), **PLAIN, **options}).create_engine_config()


@pytest.fixture(scope="module")
def plain(model: Path) -> VllmConfig:
    return config(model)


def encoder(made: VllmConfig) -> bytes:
    return encoder_namespace(made).tag


def processor(made: VllmConfig) -> bytes:
    return processor_namespace(made.model_config).tag


Names = tuple[bytes, bytes]


def names(made: VllmConfig) -> Names:
    """What an engine calls what its encoder makes, and what its processor makes."""
    return encoder(made), processor(made)


def same(one: VllmConfig | Names, other: VllmConfig | Names) -> tuple[bool, bool]:
    """Whether two engines have one name for what their encoders make, and for what their processors make."""
    mine, theirs = (each if isinstance(each, tuple) else names(each) for each in (one, other))
    return mine[0] == theirs[0], mine[1] == theirs[1]


# ---- options of the engine

OPTIONS: dict[tuple[bool, bool], dict[str, dict[str, Any]]] = {
    (False, False): {  # what reaches processor and encoder
        "dtype": {"dtype": "bfloat16"},
        "implementation": {"model_impl": "transformers"},
        "remote code": {"trust_remote_code": True},
        "processor arguments": {"mm_processor_kwargs": {"do_rescale": False}},
        "pruning": {"video_pruning_rate": 0.5},
        "another pruning": {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"},
        "overrides of the configuration": {"hf_overrides": {"vision_feature_layer": -2}},
        "a task": {"runner": "pooling", "convert": "embed"},
    },
    (False, True): {  # what reaches the encoder alone
        "tensor parallel size": {"tensor_parallel_size": 2},
        "tensor parallel size, by data": {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"},
        "LoRA on the tower": {"enable_lora": True, "enable_tower_connector_lora": True},
        "another rank of it": {"enable_lora": True, "enable_tower_connector_lora": True, "max_lora_rank": 64},
        "the encoder's attention": {"mm_encoder_attn_backend": "TORCH_SDPA"},
        "compilation": {"enforce_eager": False},
        "custom operations": {"compilation_config": {"custom_ops": ["none"]}},
        "a way of loading": {"load_format": "safetensors"},
        "settings of a loader": {"model_loader_extra_config": {"a": 1}},
        "code of workers": {"worker_extension_cls": "engine_worker.Worker"},
        "settings of a platform": {"additional_config": {"a": 1}},
        "quantization": {"dtype": "bfloat16", "quantization": "fp8"},
    },
    (True, False): {  # what changes what the encoder is given
        "tokenizer mode": {"tokenizer_mode": "hf"},
        "reading of media": {"media_io_kwargs": {"video": {"num_frames": 4}}},
        "no tokenizer": {"skip_tokenizer_init": True},
    },
    (True, True): {  # what changes no output
        "length": {"max_model_len": 128},
        "memory": {"kv_cache_memory_bytes": 64 << 20, "block_size": 32},
        "vLLM's caches": {"mm_processor_cache_gb": 1, "enable_prefix_caching": False},
        "batches": {"max_num_seqs": 3, "max_num_batched_tokens": 300},
        "names": {"served_model_name": "another"},
        "seed": {"seed": 7},
        "LoRA of the language model": {"enable_lora": True, "max_loras": 3},
        "renderers": {"renderer_num_workers": 2, "mm_processor_cache_type": "lru"},
        "rights": {"allowed_local_media_path": "/tmp"},
        "sampling": {"generation_config": "vllm", "max_logprobs": 3, "logprobs_mode": "raw_logits"},
        "data parallel engines": {"data_parallel_size": 2},
        "processes": {"distributed_executor_backend": "mp"},
        "statistics": {"disable_log_stats": True, "otlp_traces_endpoint": None},
    },
}
"""Which engines have one name, for what their encoders make and for what their processors make."""


@pytest.mark.parametrize(
    ("options", "shared"),
    [pytest.param(options, shared, id=what) for shared, found in OPTIONS.items() for what, options in found.items()],
)
def test_engines_share_what_their_options_do_not_change_and_nothing_else(
    model: Path, plain: VllmConfig, options: dict[str, Any], shared: tuple[bool, bool]
) -> None:
    # Quantized weights are not in float32.
    compared = config(model, dtype="bfloat16") if "quantization" in options else plain
    assert same(compared, config(model, **options)) == shared


# ---- files


@pytest.mark.parametrize("about", [{}, {"seed": 1}, {"projector_seed": 1}], ids=["path", "weights", "projector"])
def test_weights_are_in_the_encoders_name_alone_and_their_folders_path_in_none(
    plain: VllmConfig, tmp_path: Path, about: dict[str, Any]
) -> None:
    assert same(plain, config(write_tiny_llava(tmp_path / "elsewhere", **about))) == (not about, True)


def test_the_projector_alone_is_in_the_encoders_name_of_a_large_checkpoint(tmp_path: Path) -> None:
    one, other = (config(write_tiny_llava(tmp_path / str(seed), inner=WIDE, projector_seed=seed)) for seed in (1, 2))
    assert same(one, other) == (False, True)


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("preprocessor_config.json", (False, False)),
        ("tokenizer_config.json", (False, False)),
        ("tokenizer.json", (True, False)),
        ("README.md", (True, True)),
        (".gitattributes", (True, True)),
        ("mean.npy", (False, False)),
        ("am.mvn", (False, False)),
        ("mel_filters.npz", (False, False)),
        ("voices/one.wav", (True, False)),
        ("whisper-large-v3/config.json", (False, False)),
        ("vision/preprocessor_config.json", (False, False)),
    ],
)
def test_files_beside_the_weights_are_named_by_their_content(
    plain: VllmConfig, tmp_path: Path, name: str, shared: tuple[bool, bool]
) -> None:
    folder = write_tiny_llava(tmp_path / "changed")
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + "\n")
    assert same(plain, config(folder)) == shared


def test_a_linked_folder_is_named_by_its_content(plain: VllmConfig, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = write_tiny_llava(tmp_path / "linked")
    (folder / "vision").symlink_to(elsewhere)
    (elsewhere / "itself").symlink_to(elsewhere)
    made = config(folder)
    before = names(made)
    (elsewhere / "config.json").write_text("{}")
    assert same(before, made) == (False, False)


def test_an_encoder_that_stands_in_another_folder_is_named_by_its_content(model: Path, tmp_path: Path) -> None:
    tower = write_tiny_llava(tmp_path / "tower")
    made = config(model)
    made.model_config.model_arch_config.architectures[:] = ["UltravoxModel"]
    made.model_config.hf_config.audio_model_id = str(tower)
    before = encoder(made)
    write_tiny_llava(tower, seed=1)
    assert encoder(made) != before
    made.model_config.hf_config.audio_model_id = "some/where"
    with pytest.raises(Nameless, match="some/where"):
        encoder(made)
    assert encoder_namespace(made, revision="v1").tag


def test_vllms_models_load_no_weights_from_places_that_nobody_has_looked_at() -> None:
    import vllm.model_executor.models as models

    folder = Path(str(models.__file__)).parent
    found = {path.stem for path in folder.glob("*.py") if "secondary_weights = [" in path.read_text()}
    # Their own folders (clef_omni, kimi_audio, roberta), and what _TOWERS_ELSEWHERE names.
    assert found == {"clef_omni", "kimi_audio", "roberta", "ultravox"}


def test_a_tokenizer_in_another_folder_is_named_by_its_content(model: Path, plain: VllmConfig, tmp_path: Path) -> None:
    folder = write_tiny_llava(tmp_path / "tokenizer")
    assert same(plain, config(model, tokenizer=str(folder))) == (True, True)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
    assert same(plain, config(model, tokenizer=str(folder))) == (True, False)


def test_a_model_that_changed_after_loading_began_has_no_name(tmp_path: Path) -> None:
    folder = write_tiny_llava(tmp_path)
    made = config(folder)
    loading_begins(str(folder))
    write_tiny_llava(folder)
    with pytest.raises(Nameless, match="has changed since the engine began to load it"):
        encoder(made)


def with_code(folder: Path, code: str, auto_map: dict[str, str] | None = None) -> Path:
    """The tiny model with code of its own, in a folder beside its files."""
    write_tiny_llava(folder)
    (folder / "inner").mkdir()
    (folder / "inner" / "layers.py").write_text(code)
    if auto_map is not None:
        document = json.loads((folder / "preprocessor_config.json").read_text())
        (folder / "preprocessor_config.json").write_text(json.dumps({**document, "auto_map": auto_map}))
    return folder


def test_the_content_of_remote_code_is_in_both_names(tmp_path: Path) -> None:
    one, alike, other = (
        config(with_code(tmp_path / name, code), trust_remote_code=True)
        for name, code in (("one", "a = 1"), ("alike", "a = 1"), ("other", "a = 2"))
    )
    assert same(one, alike) == (True, True)
    assert same(one, other) == (False, False)
    # With a name for the weights too: it says nothing of code.
    assert encoder_namespace(one, revision="v1").tag != encoder_namespace(other, revision="v1").tag


def test_remote_code_of_another_repository_that_is_not_here_is_shared_with_nobody(tmp_path: Path) -> None:
    folder = with_code(tmp_path / "one", "a = 1", {"AutoImageProcessor": "some/where--code.Processor"})
    made = config(folder, trust_remote_code=True)
    assert encoder(made) != encoder(made) and processor(made) != processor(made)


def test_a_model_whose_files_are_not_to_be_found_or_elsewhere_is_shared_with_nobody(
    plain: VllmConfig, model: Path
) -> None:
    for load_format in ("tensorizer", "dummy"):
        made = config(model)
        made.load_config.load_format = load_format
        with pytest.raises(Nameless, match=r"tensord\.revision"):
            encoder(made)
        assert encoder_namespace(made, revision="v1").tag
    made = config(model)
    made.model_config.multimodal_config.mm_encoder_attn_dtype = "fp8"  # vLLM refuses it where there is no CUDA
    with pytest.raises(Nameless, match="mm_encoder_attn_dtype=fp8"):
        encoder(made)
    made = config(model)
    made.model_config.model = "/nowhere/at/all"
    assert processor(made) != processor(made)
    with pytest.raises(Nameless, match=r"/nowhere/at/all .* set tensord\.revision"):
        encoder(made)
    made = config(model)
    made.model_config.tokenizer = "/nowhere/at/all"
    assert processor(made) != processor(made)
    assert encoder(made) == encoder(plain)


def test_a_tenant_and_a_name_for_the_weights_are_in_the_encoders_name(plain: VllmConfig) -> None:
    made = {encoder_namespace(plain, **about).tag for about in ({}, {"tenant": "a"}, {"revision": "a"})}
    assert len(made) == 3


# ---- what engines run on


@pytest.mark.parametrize(
    ("variable", "value", "shared"),
    [
        ("VLLM_BATCH_INVARIANT", "1", (False, True)),
        ("DNNL_MAX_CPU_ISA", "AVX2", (False, False)),
        ("MKL_CBWR", "COMPATIBLE", (False, False)),
        ("NVIDIA_TF32_OVERRIDE", "0", (False, True)),
        ("VLLM_VIDEO_LOADER_BACKEND", "pyav", (False, False)),
        ("VLLM_PORT", "5555", (True, True)),
        ("VLLM_LOGGING_LEVEL", "DEBUG", (True, True)),
        ("VLLM_DP_RANK", "1", (True, True)),
    ],
)
def test_environment_variables_are_in_the_names_that_the_list_says(
    plain: VllmConfig, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, shared: tuple[bool, bool]
) -> None:
    before = names(plain)
    monkeypatch.setenv(variable, value)
    assert same(before, plain) == shared


def test_engines_on_as_many_cores_share_and_on_more_do_not(plain: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for cores in ("0-3", "4-7", "4,5,8-9", "0-4", "auto", "nobind"):
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", cores)
        names.append(encoder(plain))
    assert names[0] == names[1] == names[2]
    assert len(set(names)) == 4


def test_a_new_variable_of_vllms_another_version_of_it_and_of_what_computes_are_in_both_names(
    plain: VllmConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import vllm
    import vllm.envs

    about = tmp_path / "pillow-1.2.3.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: pillow\nVersion: 1.2.3\n")
    monkeypatch.setitem(vllm.envs.environment_variables, "VLLM_NEW", lambda: None)
    changes: list[Callable[[], object]] = [
        lambda: monkeypatch.setenv("VLLM_NEW", "1"),
        lambda: monkeypatch.setattr(vllm, "__version__", "0.32.1"),
        lambda: monkeypatch.syspath_prepend(str(tmp_path)),
    ]
    for change in changes:
        before = names(plain)
        change()
        assert same(before, plain) == (False, False)


def test_a_process_that_starts_anew_has_the_same_names(plain: VllmConfig, model: Path) -> None:
    program = (
        "import sys; from tests.vllm.test_names import config, encoder, processor; from pathlib import Path;"
        "made = config(Path(sys.argv[1])); print('names', encoder(made).hex(), processor(made).hex())"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, str(model)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        cwd=Path(__file__).parents[2],
    )
    line = next(line for line in told.stdout.splitlines() if line.startswith("names "))
    assert line.split()[1:] == [encoder(plain).hex(), processor(plain).hex()]
