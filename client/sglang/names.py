"""Names a rank's pages of KV: the namespace of everything that the page's hash of SGLang does not include.

SGLang's hash of a page covers the tokens from the beginning of the sequence, the request's `extra_key` and its cache
salt. In the place of a picture's tokens it covers numbers made from the hash of the picture's features. It covers
neither the weights, nor the KV's dtype and layout, nor the rank.

Owns: the namespace, the cases without one, and the settings that choose it: keys of
`--hicache-storage-backend-extra-config` that begin with "tensord.". Does not own: digests of files (checkpoints).

Invariants: ranks whose pages may differ in meaning have different namespaces. A configuration with an input that no
name covers is Nameless.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Self

import torch

from ...errors import BadConfiguration
from ..arguments.namespace import Namespace
from ..checkpoints.fingerprint import weights_changed, weights_fingerprint
from ..checkpoints.loading import loading_began_with_process
from ..identity.described import described_config, digest_of
from ..identity.engine import Nameless

TESTED: Final = "0.5.23"
"""The release of SGLang that tests run. Host pools and their pages differ between releases."""

_log = logging.getLogger("tensord")
_FORM: Final = 1
"""Version of the stored form of a page. Raise it whenever exchange.py stores something else."""
_GROUPS: Final = ("model", "exec", "lora", "mm", "spec")
"""SGLang's groups of arguments that may change KV. The others are about memory, scheduling, hosts and logs."""
_WITHOUT_EFFECT: Final = frozenset(
    {
        *("model_path", "revision", "download_dir", "model_checksum", "delete_ckpt_after_loading"),
        *("startup_weight_load_mode", "weight_loader_disable_mmap", "weight_loader_prefetch_checkpoints"),
        *("weight_loader_prefetch_num_threads", "weight_loader_drop_cache_after_load", "weight_cache_mode"),
        *("weight_cache_socket", "weight_cache_timeout", "engine_info_bootstrap_port", "modelopt_checkpoint_save_path"),
        *("modelopt_export_path", "remote_instance_weight_loader_send_weights_group_ports"),
        *("checkpoint_engine_wait_weights_before_ready", "remote_instance_weight_loader_seed_instance_ip"),
        *("remote_instance_weight_loader_seed_instance_service_port", "mooncake_ib_device", "cuda_graph_config"),
        *("grammar_backend", "sampling_backend", "enable_memory_saver", "enable_weights_cpu_backup"),
        *("allowed_media_domains", "media_url_max_file_size_mb", "mm_preprocess_cache_size_mb", "mm_io_worker_num"),
        *("mm_processor_worker_num", "expert_distribution_recorder_buffer_size", "spec_trace_dir"),
    }
)
"""Arguments of these groups that do not change KV. An argument that is not listed here tells two engines apart."""
_CONTENT_ELSEWHERE: Final = (
    *("custom_weight_loader", "modelopt_checkpoint_restore_path", "decrypted_config_file", "quantization_param_path"),
    *("kt_weight_path", "uno_lora_path", "forward_hooks"),
)
"""Arguments that name a file or code beside the model, which changes KV."""
_LOADED_ELSEWHERE: Final = frozenset(
    {"dummy", "remote", "remote_instance", "presharded", "expert_pack", "flash_rl", "private"}
)
"""Load formats whose weights are not those in the model's folder."""
_PREFIX: Final = "tensord."


@dataclass(frozen=True, kw_only=True)
class StorageSettings:
    """The storage's settings.

    Args:
        socket: `tensord.socket`, the daemon's control socket; by default found as by `Client`.
        model: `tensord.model`, the folder with the weights that the engine loads. Default: the engine's model path.
        revision: `tensord.revision`, a name for the weights instead of a fingerprint of their files. Engines with the
            same revision must have the same weights; tensord does not check this.
        tenant: `tensord.tenant`, a salt. Engines with different tenants share nothing.
    """

    socket: str | None = None
    model: str = ""
    revision: str = ""
    tenant: str = ""

    @classmethod
    def read(cls, extra_config: Mapping[str, Any] | None) -> Self:
        """The settings. Raises BadConfiguration for an unknown key of tensord, or a value that cannot be printed."""
        known = [_PREFIX + field.name for field in fields(cls)]
        found = {}
        for key, value in (extra_config or {}).items():
            if _PREFIX not in key.lower():
                continue
            if key not in known:
                raise BadConfiguration(
                    f"{key!r} in the storage backend's extra config is unknown; there are {', '.join(known)}"
                )
            if not isinstance(value, str) or not value or not value.isprintable():
                raise BadConfiguration(
                    f"{key}={value!r} must be text that can be printed; leave it out for the default"
                )
            found[key.removeprefix(_PREFIX)] = value
        return cls(**found)


def engine_arguments() -> dict[str, Any]:
    """The resolved arguments of the engine in this process, by name, of `_GROUPS`; empty without an engine."""
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.arg_groups.overrides import resolution_result
    from sglang.srt.runtime_context import get_server_args

    try:
        given = get_server_args()
    except ValueError:
        return {}
    paths = namespace_of(type(given)).items()
    wanted = [name for name, path in paths if path.split(".")[0] in _GROUPS or name in _CONTENT_ELSEWHERE]
    return {name: resolution_result(given, name) for name in wanted}


def weights_name(config: Any, settings: StorageSettings, arguments: dict[str, Any]) -> str:
    """The name of the engine's weights. Reads the whole weight files, unless a note of their digest exists.
    Raises Nameless if the pages have no name, OSError if a weight file cannot be read.

    Args:
        config: SGLang's `HiCacheStorageConfig`.
        arguments: `engine_arguments()`.
    """
    _refuse(config, arguments)
    if settings.revision:
        return settings.revision
    model = settings.model or arguments.get("model_path") or config.model_name
    load_format = str(arguments.get("load_format", "auto"))
    cached = arguments.get("weight_cache_mode") not in (None, "off")
    if not model or cached or load_format in _LOADED_ELSEWHERE:
        how = "from a weight cache" if cached else f"load format {load_format}"
        raise Nameless(f"the weights ({how}) are in no folder; set tensord.revision")
    loading_began_with_process(model)
    weights = weights_fingerprint(model, arguments.get("revision"), download_folder=arguments.get("download_dir"))
    if weights is None:
        raise Nameless(f"the weights of {model} are not in files on this host; set tensord.model or tensord.revision")
    if (changed := weights_changed(model)) is not None:
        raise Nameless(f"{changed} has changed since this process began; start the engine again")
    return weights


def _refuse(config: Any, arguments: dict[str, Any]) -> None:
    import sglang

    draft = arguments.get("speculative_draft_model_path")
    elsewhere = [name for name in _CONTENT_ELSEWHERE if arguments.get(name)]
    why = None
    if sglang.__version__ != TESTED:
        why = f"it is tested with SGLang {TESTED}, and this is {sglang.__version__}"
    elif elsewhere:
        why = f"no name covers what {', '.join(elsewhere)} refers to; start the engine without it"
    elif not (config.extra_config or {}).get("interface_v1"):
        why = 'it passes pages as tensors; set "interface_v1": 1 in the storage backend\'s extra config'
    elif config.dcp_size > 1:
        why = "pages of decode context parallelism (dcp_size over 1) are not covered"
    elif arguments.get("enable_lora") or arguments.get("lora_paths"):
        why = "SGLang names a LoRA adapter by its path, not by its weights; start the engine without LoRA"
    elif arguments.get("trust_mm_content_hashes"):
        why = "with --trust-mm-content-hashes a client's name stands for a picture; start the engine without it"
    elif draft and draft != arguments.get("model_path"):
        why = f"the weights of the draft model {draft} have no name; start the engine without it"
    if why is not None:
        raise Nameless(why)


def namespace(
    weights: str, config: Any, layout: dict[str, Any], tenant: str, arguments: dict[str, Any], *, replicated: bool
) -> Namespace:
    """The namespace of a rank's pages in one host pool.

    Args:
        layout: what the bytes of a page mean (`HostPages.layout`).
        replicated: whether all tensor-parallel ranks have equal pages in this pool. SGLang lets one of them write."""
    rank = {
        "tp": [0 if replicated else config.tp_rank, config.tp_size],
        "pp": [config.pp_rank, config.pp_size],
        "cp": [config.attn_cp_rank, config.attn_cp_size],
        # dp_rank is left out: the groups of data parallelism compute the same.
    }
    told = {name: described_config(value) for name, value in arguments.items() if name not in _WITHOUT_EFFECT}
    odd = [name for name, value in told.items() if '{"unknown": ' in json.dumps(value)]
    if odd:
        _log.warning("tensord: the values of %s have no form to compare, so this engine shares with no other", odd)
    return Namespace(
        model="sglang kv",
        revision=f"{weights} {digest_of([_FORM, layout, rank, told])}",
        dtype=str(layout.get("dtype", "none")).removeprefix("torch."),
        processor=f"sglang {TESTED}, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu'}",
        tenant=tenant,
    )
