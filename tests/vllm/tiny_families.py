"""Tiny models of further families, which vLLM runs by code of its own and by that of transformers.

Owns: folders as `tiny_llava.write_tiny_llava` writes them, of random weights that make the answer depend on the
picture. Nothing is downloaded. transformers writes the configuration and the weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors.torch import load_file, save_file

from .tiny_llava import (
    PATCH_SIDE,
    PICTURE_SIDE,
    PICTURE_TOKENS,
    POSITIONS_MAX,
    SPREAD,
    VOCABULARY,
    WIDTH,
    tokenizer,
    write_tiny_llava,
)

# Behind those of tiny_llava's tokenizer, in this order.
_GEMMA: Final = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"} | {
    f"lines_{count}": "\n" * count
    for count in range(1, 5)  # vLLM asks the tokenizer for them
}
_TOWER: Final = re.compile(r"(vision_tower)\.(?!vision_model\.)")
_KIND: Final = {"format": "pt"}
_TEXT: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": WIDTH // 2,
    "max_position_embeddings": POSITIONS_MAX,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_tiny_gemma3(folder: Path) -> Path:
    """Writes a Gemma 3 into the folder, and gives the folder back."""
    numbers = _write_tokenizer(folder, "Gemma3Processor", _GEMMA)
    config = transformers.Gemma3Config(
        text_config={**_TEXT, "sliding_window": POSITIONS_MAX, "query_pre_attn_scalar": WIDTH // 2},
        vision_config={
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": PICTURE_SIDE,
            "patch_size": PATCH_SIDE,
            "vision_use_head": False,
        },
        mm_tokens_per_image=PICTURE_TOKENS,
        boi_token_index=numbers["boi"],
        eoi_token_index=numbers["eoi"],
        image_token_index=numbers["image"],
        tie_word_embeddings=True,
    )
    _write(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "size": {"height": PICTURE_SIDE, "width": PICTURE_SIDE},
            "do_pan_and_scan": False,
        },
    )
    _write(folder / "processor_config.json", {"processor_class": "Gemma3Processor", "image_seq_length": PICTURE_TOKENS})
    return _write_weights(folder, transformers.Gemma3ForConditionalGeneration, config)


FAMILIES: Final[dict[str, tuple[Callable[[Path], Path], str]]] = {
    "LLaVA": (write_tiny_llava, "<image> "),
    "Gemma 3": (write_tiny_gemma3, "<start_of_image>"),
}
"""By name: what writes a model of the family into a folder, and how its prompts say "a picture"."""


def _write_tokenizer(folder: Path, processor: str, special: dict[str, str]) -> dict[str, int]:
    """tiny_llava's tokenizer with more special tokens. Gives the number of each."""
    folder.mkdir(parents=True, exist_ok=True)
    document = tokenizer()
    words = document["model"]["vocab"]
    numbers = {name: len(words) + place for place, name in enumerate(special)}
    for name, word in special.items():
        words[word] = numbers[name]
        document["added_tokens"].append({**document["added_tokens"][0], "id": numbers[name], "content": word})
    _write(folder / "tokenizer.json", document)
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": processor,
            "pad_token": "<pad>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "extra_special_tokens": {f"{name}_token": word for name, word in special.items()},
            "model_max_length": POSITIONS_MAX,
            "clean_up_tokenization_spaces": False,
        },
    )
    return numbers


def _write_weights(folder: Path, model_class: Any, config: Any) -> Path:
    """Norms' weights and biases are what the class begins with; the rest is drawn as in tiny_llava."""
    torch.manual_seed(0)
    model = model_class(config).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, SPREAD)
        if config.tie_word_embeddings:
            # Else a token's likeliest successor is the token.
            model.get_input_embeddings().weight.normal_(0, SPREAD / 8)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    # As published checkpoints name them, and vLLM reads them.
    save_file({_TOWER.sub(r"\1.vision_model.", name): tensor for name, tensor in load_file(path).items()}, path, _KIND)
    return folder


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1))
