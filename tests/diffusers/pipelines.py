"""Tiny pipelines of diffusers with random weights, made offline."""

from __future__ import annotations

import os
from typing import Any, Final

os.environ["HF_HUB_OFFLINE"] = "1"

import diffusers
import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from tensord.client.diffusers import tally

LETTERS: Final = [chr(number) for number in range(ord("a"), ord("z") + 1)]
LENGTH: Final = 16
"""Tokens of a prompt for CLIP."""
SD: Final = "StableDiffusionPipeline"
XL: Final = "StableDiffusionXLPipeline"
FLUX: Final = "FluxPipeline"


def clip_tokenizer() -> Any:
    words = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=LENGTH)


def t5_tokenizer() -> Any:
    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]
    return T5TokenizerFast(vocab=words, extra_ids=0)


def clip(seed: int = 0, kind: Any = CLIPTextModel) -> Any:
    config = CLIPTextConfig(
        vocab_size=2 * len(LETTERS) + 2,
        hidden_size=16,
        intermediate_size=32,
        projection_dim=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        bos_token_id=2 * len(LETTERS),
        eos_token_id=2 * len(LETTERS) + 1,
    )
    torch.manual_seed(seed)
    return kind(config).eval()


def t5(seed: int = 0) -> Any:
    config = T5Config(vocab_size=4 + len(LETTERS), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    torch.manual_seed(seed)
    return T5EncoderModel(config).eval()


def pipeline(name: str, **parts: Any) -> Any:
    """A pipeline of this class, with text encoders and tokenizers; `parts` replace them."""
    kind = getattr(diffusers, name)
    given: dict[str, Any] = {"text_encoder": clip(), "tokenizer": clip_tokenizer()}
    if "XL" in name:
        given |= {"text_encoder_2": clip(1, CLIPTextModelWithProjection), "tokenizer_2": clip_tokenizer()}
    elif "Diffusion3" in name:
        given["text_encoder"] = clip(0, CLIPTextModelWithProjection)
        given |= {"text_encoder_2": clip(1, CLIPTextModelWithProjection), "tokenizer_2": clip_tokenizer()}
        given |= {"text_encoder_3": t5(), "tokenizer_3": t5_tokenizer()}
    elif "Flux" in name:
        given |= {"text_encoder_2": t5(), "tokenizer_2": t5_tokenizer()}
    else:
        given |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    given |= models(name) | parts
    return kind(**given)


def models(name: str) -> dict[str, Any]:
    """The models and the scheduler beside the text encoders."""
    torch.manual_seed(2)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, latent_channels=4, sample_size=16, layers_per_block=1
    )
    if "Flux" in name or "Diffusion3" in name:
        return {"vae": vae, "transformer": None, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=2,
    )
    return {"vae": vae, "unet": unet, "scheduler": diffusers.DDIMScheduler()}


def arguments(name: str, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"prompt": "a cat", "device": torch.device("cpu"), "num_images_per_prompt": 1}
    if "Flux" not in name and "Diffusion3" not in name:
        return given | {"do_classifier_free_guidance": True} | more
    third = {"prompt_3": None} if "Diffusion3" in name else {}
    return given | {"prompt_2": None, "max_sequence_length": 32} | third | more


def counts(of: Any) -> tuple[int, int, int]:
    """Found, encoded, passed."""
    found = tally(of)
    return found.found, found.encoded, found.passed
