"""A tiny vision-language decoder: a Llama of 4 layers with random weights from a seed, and a vision tower.

The vision tower makes 64 tokens of a picture of 64 × 64 pixels.

Owns: the weights, and three ways to run them: transformers' LlamaForCausalLM, or short code on torch or numpy arrays.
Does not own: the prompts (chat_prefix.py).

All three compute the same function in float32. Their last bits differ; so do those of one library with other batches of
the same tokens.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Keys = list[tuple[Any, Any]]
"""Keys and values of each layer, each (KV_HEADS, tokens, HEAD)."""
Kind = Literal["transformers", "torch", "numpy"]

VOCABULARY: Final = 264
BEGIN, PICTURE, USER, AGENT = 256, 257, 258, 259  # the numbers after the 256 bytes
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, INNER = 4, 128, 4, 2, 32, 256
SIDE, PATCH = 64, 8
PICTURE_TOKENS: Final = (SIDE // PATCH) ** 2
ROPE_BASE: Final = 10_000.0
EPSILON: Final = 1e-6
SEED: Final = 7


def tokens_of(text: str) -> list[int]:
    """Its bytes."""
    return list(text.encode())


def text_of(tokens: list[int]) -> str:
    """A printable form of the tokens: random weights give no words."""
    return "".join(chr(token) if 32 <= token < 127 else "·" for token in tokens)


def weights(seed: int = SEED) -> dict[str, Array]:
    """The weights, float32, by transformers' names; those of the vision tower begin with `vision.`."""
    chance = np.random.default_rng(seed)

    def matrix(outputs: int, inputs: int, scale: float = 1.0) -> Array:
        values: Array = chance.standard_normal((outputs, inputs)) * scale / np.sqrt(inputs)
        return values.astype(np.float32)

    found = {"model.embed_tokens.weight": matrix(VOCABULARY, WIDTH, np.sqrt(WIDTH))}
    for number in range(LAYERS):
        at = f"model.layers.{number}."
        # Sharp attention, so that a change of one token changes the generated tokens.
        found[at + "self_attn.q_proj.weight"] = matrix(HEADS * HEAD, WIDTH, 2.0)
        found[at + "self_attn.k_proj.weight"] = matrix(KV_HEADS * HEAD, WIDTH, 2.0)
        found[at + "self_attn.v_proj.weight"] = matrix(KV_HEADS * HEAD, WIDTH, 2.0)
        found[at + "self_attn.o_proj.weight"] = matrix(WIDTH, HEADS * HEAD)
        found[at + "mlp.gate_proj.weight"] = matrix(INNER, WIDTH)
        found[at + "mlp.up_proj.weight"] = matrix(INNER, WIDTH)
        found[at + "mlp.down_proj.weight"] = matrix(WIDTH, INNER)
        found[at + "input_layernorm.weight"] = np.ones(WIDTH, np.float32)
        found[at + "post_attention_layernorm.weight"] = np.ones(WIDTH, np.float32)
    found["model.norm.weight"] = np.ones(WIDTH, np.float32)
    found["lm_head.weight"] = matrix(VOCABULARY, WIDTH)
    found["vision.patches"] = matrix(WIDTH, PATCH * PATCH * 3)
    found["vision.places"] = matrix(PICTURE_TOKENS, WIDTH, np.sqrt(WIDTH))
    return found


class Decoder(Protocol):
    """The interface of the demonstration's models."""

    name: str

    def take(self, values: Array) -> Any:
        """Keys or values of another process, in this model's form."""
        ...

    def see(self, pixels: npt.NDArray[np.uint8]) -> Any:
        """The tokens of a picture, uint8 (64, 64, 3): (64, WIDTH)."""
        ...

    def embed(self, tokens: Array) -> Any:
        """The rows of tokens (n,): (n, WIDTH). The rows of a picture may replace some."""
        ...

    def forward(self, rows: Any, past: Keys) -> tuple[Keys, Any]:
        """Computes `rows`, (n, WIDTH), after `past` (an empty list: no past).

        Returns the keys and values of all tokens, and the logits of the last one, (VOCABULARY,).
        """
        ...


class ArrayDecoder:
    """The decoder on numpy arrays or torch tensors; `library` is numpy or torch."""

    def __init__(self, library: Any, name: str, found: dict[str, Array]) -> None:
        self.name = name
        self._np = library
        as_array = library.asarray
        self._weights = {key: as_array(value) for key, value in found.items()}

    def take(self, values: Array) -> Any:
        return self._np.asarray(values)

    def see(self, pixels: npt.NDArray[np.uint8]) -> Any:
        side = SIDE // PATCH
        patches = pixels.reshape(side, PATCH, side, PATCH, 3).swapaxes(1, 2).reshape(PICTURE_TOKENS, -1)
        values = self._np.asarray((patches / 64.0 - 2.0).astype(np.float32))
        return self._np.tanh(values @ self._weights["vision.patches"].T) + self._weights["vision.places"]

    def embed(self, tokens: Array) -> Any:
        return self._weights["model.embed_tokens.weight"][self._np.asarray(tokens.astype(np.int64))]

    def forward(self, rows: Any, past: Keys) -> tuple[Keys, Any]:
        first = past[0][0].shape[1] if past else 0
        turn = self._turns(first, len(rows))
        keys: Keys = []
        for number in range(LAYERS):
            at = f"model.layers.{number}."
            rows = rows + self._attend(at, rows, past[number] if past else None, turn, keys)
            inner = self._even(rows, at + "post_attention_layernorm.weight")
            gate = inner @ self._weights[at + "mlp.gate_proj.weight"].T
            gate = gate / (1.0 + self._np.exp(-gate)) * (inner @ self._weights[at + "mlp.up_proj.weight"].T)
            rows = rows + gate @ self._weights[at + "mlp.down_proj.weight"].T
        return keys, self._even(rows[-1:], "model.norm.weight")[0] @ self._weights["lm_head.weight"].T

    def _attend(self, at: str, rows: Any, past: tuple[Any, Any] | None, turn: tuple[Any, Any], keys: Keys) -> Any:
        count = len(rows)
        inner = self._even(rows, at + "input_layernorm.weight")
        query, key, value = (
            (inner @ self._weights[f"{at}self_attn.{name}_proj.weight"].T).reshape(count, -1, HEAD).swapaxes(0, 1)
            for name in "qkv"
        )
        query, key = self._rotated(query, turn), self._rotated(key, turn)
        if past is not None:
            key, value = (self._np.concatenate((old, new), 1) for old, new in zip(past, (key, value), strict=True))
        keys.append((key, value))
        # The heads of a group share keys and values: (KV_HEADS, group, count, HEAD) @ (KV_HEADS, 1, HEAD, all).
        scores = query.reshape(KV_HEADS, -1, count, HEAD) @ key[:, None].swapaxes(-1, -2) / HEAD**0.5
        seen = np.tri(count, key.shape[1], key.shape[1] - count, dtype=bool)
        scores = scores + self._np.asarray(np.where(seen, 0.0, -np.inf).astype(np.float32))
        scores = self._np.exp(scores - self._np.amax(scores, -1, keepdims=True))
        mixed = (scores @ value[:, None]) / scores.sum(-1)[..., None]
        mixed = mixed.reshape(HEADS, count, HEAD).swapaxes(0, 1).reshape(count, -1)
        return mixed @ self._weights[at + "self_attn.o_proj.weight"].T

    def _even(self, rows: Any, name: str) -> Any:
        return rows / self._np.sqrt((rows * rows).mean(-1)[:, None] + EPSILON) * self._weights[name]

    def _turns(self, first: int, count: int) -> tuple[Any, Any]:
        """The cosines and sines of each position, (count, HEAD)."""
        frequencies = (1.0 / ROPE_BASE ** (np.arange(0, HEAD, 2) / HEAD)).astype(np.float32)
        angles = np.arange(first, first + count, dtype=np.float32)[:, None] * np.tile(frequencies, 2)
        return self._np.asarray(np.cos(angles)), self._np.asarray(np.sin(angles))

    def _rotated(self, vectors: Any, turn: tuple[Any, Any]) -> Any:
        half = HEAD // 2
        turned = self._np.concatenate((-vectors[..., half:], vectors[..., :half]), -1)
        return vectors * turn[0] + turned * turn[1]


class LlamaDecoder(ArrayDecoder):
    """The decoder in transformers; the vision tower is ArrayDecoder's."""

    def __init__(self, torch: Any, found: dict[str, Array]) -> None:
        super().__init__(torch, "transformers", found)
        from transformers import DynamicCache

        self._cache: Any = DynamicCache
        self._model = llama(found)
        # Before transformers 5.24 the argument had another name.
        parameters = inspect.signature(self._model.forward).parameters
        self._argument = "cache" if "cache" in parameters else "past_key_values"

    def forward(self, rows: Any, past: Keys) -> tuple[Keys, Any]:
        cache = self._cache()
        for number, (key, value) in enumerate(past):
            cache.update(key[None], value[None], number)
        with self._np.no_grad():
            given = self._model(inputs_embeds=rows[None], use_cache=True, logits_to_keep=1, **{self._argument: cache})
        keys = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
        return keys, given.logits[0, -1]


def llama(found: dict[str, Array]) -> Any:
    """transformers' model with these weights, in eval mode; without the vision tower."""
    import torch
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        rms_norm_eps=EPSILON,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    model: Any = LlamaForCausalLM(config)
    state = {name: torch.from_numpy(value) for name, value in found.items() if not name.startswith("vision.")}
    model.load_state_dict(state)
    return model.eval()


def best_kind() -> Kind:
    """The first kind whose library is installed."""
    if find_spec("torch") is None:
        return "numpy"
    return "transformers" if find_spec("transformers") is not None else "torch"


def decoder(kind: Kind) -> Decoder:
    """A decoder of that kind. All kinds compute the same function."""
    found = weights()
    if kind == "numpy":
        return ArrayDecoder(np, "numpy", found)
    import torch

    torch.set_num_threads(1)  # three processes share the machine
    return LlamaDecoder(torch, found) if kind == "transformers" else ArrayDecoder(torch, "torch", found)
