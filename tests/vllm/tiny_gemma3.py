"""A tiny Gemma 3, which vLLM runs by code of its own and by that of transformers.

Owns: a folder as `tiny_llava.write_tiny_llava` writes it, of random weights that make the answer depend on the picture.
Nothing is downloaded. transformers writes the configuration and the weights.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

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
)

# Behind those of tiny_llava's tokenizer, in this order.
_SPECIAL: Final = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"} | {
    f"lines_{count}": "\n" * count
    for count in range(1, 5)  # vLLM asks the tokenizer for them
}
_TOWER: Final = re.compile(r"(vision_tower)\.(?!vision_model\.)")


def write_tiny_gemma3(folder: Path) -> Path:
    """Writes the model into the folder, and gives the folder back."""
    folder.mkdir(parents=True, exist_ok=True)
    words = tokenizer()
    vocabulary = words["model"]["vocab"]
    numbers = {name: len(vocabulary) + place for place, name in enumerate(_SPECIAL)}
    for name, word in _SPECIAL.items():
        vocabulary[word] = numbers[name]
        words["added_tokens"].append({**words["added_tokens"][0], "id": numbers[name], "content": word})
    documents = {
        "tokenizer.json": words,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": "Gemma3Processor",
            "pad_token": "<pad>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "extra_special_tokens": {f"{name}_token": word for name, word in _SPECIAL.items()},
            "model_max_length": POSITIONS_MAX,
            "clean_up_tokenization_spaces": False,
        },
        "preprocessor_config.json": {
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "size": {"height": PICTURE_SIDE, "width": PICTURE_SIDE},
            "do_pan_and_scan": False,
        },
        "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": PICTURE_TOKENS},
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=1))
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={
            **sizes,
            "vocab_size": VOCABULARY,
            "num_key_value_heads": 2,
            "head_dim": WIDTH // 2,
            "max_position_embeddings": POSITIONS_MAX,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "sliding_window": POSITIONS_MAX,
            "query_pre_attn_scalar": WIDTH // 2,
        },
        vision_config={**sizes, "image_size": PICTURE_SIDE, "patch_size": PATCH_SIDE, "vision_use_head": False},
        mm_tokens_per_image=PICTURE_TOKENS,
        boi_token_index=numbers["boi"],
        eoi_token_index=numbers["eoi"],
        image_token_index=numbers["image"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).to(torch.float32)
    with torch.no_grad():
        # Norms' weights and biases are what the class begins with.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, SPREAD)
        # Else a token's likeliest successor is the token.
        model.get_input_embeddings().weight.normal_(0, SPREAD / 8)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    # As published checkpoints name them, and vLLM reads them.
    tensors = {_TOWER.sub(r"\1.vision_model.", name): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    return folder
