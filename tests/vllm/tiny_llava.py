"""A LLaVA small enough for two cores: 238 thousand random weights that make the answer depend on the picture.

Owns: a folder with a configuration, a tokenizer, a processor and weights, as vLLM and transformers read them. Nothing
is downloaded, and neither of them is needed to write it. The same seed gives the same bytes, so engines started on two
such folders are engines of one model; another seed is another model of the same shape.

One picture is PICTURE_TOKENS tokens of WIDTH float32 numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

WIDTH: Final = 64
LAYERS: Final = 2
INNER: Final = 128
WIDE: Final = 49_152
PICTURE_SIDE: Final = 56
PATCH_SIDE: Final = 14
PICTURE_TOKENS: Final = (PICTURE_SIDE // PATCH_SIDE) ** 2
VOCABULARY: Final = 320
SPECIAL: Final = ("<pad>", "<s>", "</s>", "<image>")
IMAGE: Final = SPECIAL.index("<image>")
POSITIONS_MAX: Final = 512
# Weights of the usual size (0.02) leave one answer for all pictures.
SPREAD: Final = 0.25

_TEMPLATE: Final = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def write_tiny_llava(
    folder: Path,
    seed: int = 0,
    *,
    inner: int = INNER,
    projector_seed: int | None = None,
    positions: int = POSITIONS_MAX,
) -> Path:
    """Writes the model into `folder`, which is made if it is not there, and gives the folder back.

    Args:
        inner: the language model's inner width; WIDE makes the file larger than 64 MiB.
        projector_seed: of the projector's weights, where they are to differ from the seed's and nothing else is.
        positions: the longest sequence, in tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in _documents(inner, positions).items():
        (folder / name).write_text(json.dumps(document, indent=1))
    _write_weights(folder / "model.safetensors", seed, inner, projector_seed)
    return folder


def _documents(inner: int, positions: int) -> dict[str, dict[str, Any]]:
    side = {"height": PICTURE_SIDE, "width": PICTURE_SIDE}
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    return {
        "config.json": {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "dtype": "float32",
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            "vision_config": {
                **sizes,
                "model_type": "clip_vision_model",
                "intermediate_size": INNER,
                "image_size": PICTURE_SIDE,
                "patch_size": PATCH_SIDE,
                "projection_dim": WIDTH,
            },
            "text_config": {
                **sizes,
                "model_type": "llama",
                "vocab_size": VOCABULARY,
                "intermediate_size": inner,
                "num_key_value_heads": 2,
                "head_dim": WIDTH // 2,
                "max_position_embeddings": positions,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
        },
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"shortest_edge": PICTURE_SIDE},
            "do_center_crop": True,
            "crop_size": side,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.25, 0.25, 0.25],
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "image_token": "<image>",
            "patch_size": PATCH_SIDE,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "extra_special_tokens": {"image_token": "<image>"},
            "model_max_length": positions,
            "clean_up_tokenization_spaces": False,
            "chat_template": _TEMPLATE,
        },
        "tokenizer.json": tokenizer(),
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    }


def tokenizer() -> dict[str, Any]:
    """One token a byte: any text can be said, and nothing has to be trained."""
    added = [
        {"id": number, "content": word, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number, word in enumerate(SPECIAL)
    ]
    words = {word: number for number, word in enumerate([*SPECIAL, *_letters()])}
    spelling = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": spelling,
        "post_processor": None,
        "decoder": spelling,
        "model": {"type": "BPE", "vocab": words, "merges": []},
    }


def _letters() -> Iterator[str]:
    """How a byte-level vocabulary spells the bytes 0 to 255: printable ones as themselves, others from U+0100 up."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = 0
    for byte in range(256):
        if byte in plain:
            yield chr(byte)
        else:
            yield chr(0x100 + others)
            others += 1


def _shapes(inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The weights' names, as vLLM 0.32 reads them, and their shapes."""
    square, vector = (WIDTH, WIDTH), (WIDTH,)
    tower = "vision_tower.vision_model"
    yield f"{tower}.embeddings.class_embedding", vector
    yield f"{tower}.embeddings.patch_embedding.weight", (WIDTH, 3, PATCH_SIDE, PATCH_SIDE)
    yield f"{tower}.embeddings.position_embedding.weight", (PICTURE_TOKENS + 1, WIDTH)
    for norm in ("pre_layrnorm", "post_layernorm"):
        yield f"{tower}.{norm}.weight", vector
        yield f"{tower}.{norm}.bias", vector
    for layer in range(LAYERS):
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield f"{tower}.encoder.layers.{layer}.self_attn.{name}.weight", square
            yield f"{tower}.encoder.layers.{layer}.self_attn.{name}.bias", vector
        for name, shape in (("fc1", (INNER, WIDTH)), ("fc2", (WIDTH, INNER))):
            yield f"{tower}.encoder.layers.{layer}.mlp.{name}.weight", shape
            yield f"{tower}.encoder.layers.{layer}.mlp.{name}.bias", shape[:1]
        for norm in ("layer_norm1", "layer_norm2"):
            yield f"{tower}.encoder.layers.{layer}.{norm}.weight", vector
            yield f"{tower}.encoder.layers.{layer}.{norm}.bias", vector
    for name in ("linear_1", "linear_2"):
        yield f"multi_modal_projector.{name}.weight", square
        yield f"multi_modal_projector.{name}.bias", vector
    yield "language_model.model.embed_tokens.weight", (VOCABULARY, WIDTH)
    for layer in range(LAYERS):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"language_model.model.layers.{layer}.self_attn.{name}.weight", square
        for name, shape in (("gate_proj", (inner, WIDTH)), ("up_proj", (inner, WIDTH)), ("down_proj", (WIDTH, inner))):
            yield f"language_model.model.layers.{layer}.mlp.{name}.weight", shape
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"language_model.model.layers.{layer}.{norm}.weight", vector
    yield "language_model.model.norm.weight", vector
    yield "language_model.lm_head.weight", (VOCABULARY, WIDTH)


def _write_weights(path: Path, seed: int, inner: int, projector_seed: int | None) -> None:
    """Writes a safetensors file: the length of a JSON header in 8 bytes, the header, and the arrays one after another.

    Norms' weights are one and all biases are zero, as in a model before its training.
    """
    common = np.random.default_rng(seed)
    own = common if projector_seed is None else np.random.default_rng(projector_seed)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    arrays = []
    at = 0
    for name, shape in _shapes(inner):
        if len(shape) > 1:
            array = common.normal(0, SPREAD, shape).astype(np.float32)
            if own is not common and name.startswith("multi_modal_projector."):
                array = own.normal(0, SPREAD, shape).astype(np.float32)
        else:
            ones = name.endswith(".weight")  # of a norm: no other weight has one dimension
            array = np.full(shape, ones, np.float32)
        arrays.append(array)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            file.write(array.tobytes())
