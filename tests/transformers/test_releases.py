"""Releases of transformers: what has all that sharing needs shares, whatever its number is, and one log line names what
is missing before the first call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import cache_utils

import tensord
from tensord.client.transformers import cached, prefix_cached, tally
from tensord.client.transformers.conditions import NotShared
from tensord.client.transformers.language import caches
from tensord.client.transformers.language.families import check_model

from .language.language_models import PROMPT, generated, language_model, prompt, sharing
from .vision_models import clip, llava, pixels, whisper

Patch = pytest.MonkeyPatch
Lines = Callable[[], list[str]]


@pytest.fixture(autouse=True)
def _classes_are_tried_anew() -> Iterator[None]:
    caches._check_class.cache_clear()
    yield
    caches._check_class.cache_clear()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    return lambda: [record.getMessage() for record in caplog.records if record.name == "tensord"]


# ---- language models


@pytest.mark.parametrize("version", ["5.0.0", "5.99.1", "7.0.0.dev0"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next", "nemotron_h"])
@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_release_is_not_judged_by_its_number(
    family: str, version: str, client: tensord.Client, monkeypatch: Patch, lines: Lines
) -> None:
    """Nor does anything here call what transformers is about to remove."""
    monkeypatch.setattr(transformers, "__version__", version)
    shared = sharing(language_model(family), client)
    generated(shared, prompt(PROMPT))
    assert shared.tally.found_tokens > 0
    assert lines() == []


def tensors_reused(patch: Patch) -> None:
    """The layer overwrites the tensors that it replaces."""
    plain = cache_utils.DynamicLayer.update

    def update(self: Any, *args: Any, **more: Any) -> Any:
        replaced = (self.keys, self.values) if self.is_initialized else ()
        found = plain(self, *args, **more)
        for each in replaced:
            each.zero_()
        return found

    patch.setattr(cache_utils.DynamicLayer, "update", update)


def another_window(patch: Patch) -> None:
    """One token more is kept."""
    kind = cache_utils.DynamicSlidingWindowLayer

    def update(self: Any, keys: Any, values: Any, *_args: Any, **_more: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.cumulative_length += keys.shape[-2]
        full = torch.cat([self.keys, keys], -2), torch.cat([self.values, values], -2)
        self.keys, self.values = (each[:, :, -self.sliding_window :] for each in full)
        first = -self.sliding_window + 1 - keys.shape[-2]
        return full[0][:, :, first:], full[1][:, :, first:]

    patch.setattr(kind, "update", update)


def state_beside(patch: Patch) -> None:
    """A state depends on a number that is kept under a name of its own."""
    plain = cache_utils.LinearAttentionLayer.update_conv_state

    def update(self: Any, *args: Any, **more: Any) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        return plain(self, *args, **more) + (0 if self.steps < 2 else 1e-9)

    patch.setattr(cache_utils.LinearAttentionLayer, "update_conv_state", update)


def another_argument(patch: Patch) -> None:
    """The model takes its cache under a name that nobody knows."""
    plain = transformers.LlamaForCausalLM.forward

    def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, **more: Any) -> Any:
        return plain(self, input_ids=input_ids, attention_mask=attention_mask, **more)

    patch.setattr(transformers.LlamaForCausalLM, "forward", forward)


LAYERS: dict[str, tuple[Callable[[Patch], None], str, str]] = {
    "tensors reused": (tensors_reused, "llama", "DynamicLayer of transformers"),
    "another window": (another_window, "gemma2", "a tensor of shape"),
    "a state beside": (state_beside, "lfm2", "its states differ"),
    "another argument": (another_argument, "llama", "has no parameter cache, cache_params or past_key_values"),
}


@pytest.mark.parametrize(("change", "family", "why"), LAYERS.values(), ids=list(LAYERS))
def test_a_release_that_keeps_tokens_in_another_way_shares_nothing_and_one_line_says_why_at_once(
    change: Callable[[Patch], None], family: str, why: str, client: tensord.Client, monkeypatch: Patch, lines: Lines
) -> None:
    model = language_model(family)
    change(monkeypatch)
    shared = prefix_cached(model, client, block_tokens=16)
    (line,) = lines()
    assert line.startswith(f"tensord: prompts of {type(model).__name__} are not shared: ") and why in line
    for _ in range(2):
        ids = prompt(PROMPT)
        assert torch.equal(shared.generate(ids, max_new_tokens=4), model.generate(ids, max_new_tokens=4))
    assert shared.flush()
    assert lines() == [line]
    assert (shared.tally.calls, shared.tally.passed, list(shared.tally.reasons.values())) == (0, 2, [2])
    assert not client.status()["store"]["entries"]


def test_what_one_family_lacks_ends_no_other_ones_sharing(client: tensord.Client, monkeypatch: Patch) -> None:
    another_window(monkeypatch)
    sharing(language_model("llama"), client)
    with pytest.raises(NotShared, match="DynamicSlidingWindowLayer of transformers"):
        check_model(language_model("mistral"))


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_of_the_caller_ends_no_sharing(device: str, client: tensord.Client) -> None:
    models = [language_model(family) for family in ("llama", "gemma2", "lfm2")]
    before = torch.random.get_rng_state()
    with torch.device(device):
        assert [prefix_cached(model, client).tally.reasons for model in models] == [{}] * 3
    assert torch.equal(torch.random.get_rng_state(), before)


# ---- encoders


def test_an_encoder_that_cannot_share_computes_and_one_line_says_why_at_once(
    client: tensord.Client, monkeypatch: Patch, lines: Lines
) -> None:
    model = clip()
    plain = transformers.CLIPVisionModel.forward

    def renamed(self: Any, images: Any = None, **more: Any) -> Any:
        return plain(self, **more, **({} if images is None else {"pixel_values": images}))

    monkeypatch.setattr(transformers.CLIPVisionModel, "forward", renamed)
    cached(model, client)
    (line,) = lines()
    assert line.startswith(
        "tensord: outputs of CLIPVisionModel are not shared: CLIPVisionModel.forward of transformers"
    )
    assert line.endswith("has no parameter pixel_values, which sharing needs")
    assert model(**pixels(1)).pooler_output.shape[0] == 1
    assert tally(model).passed == 1
    assert lines() == [line]


@pytest.mark.parametrize("make", [clip, llava, whisper])
def test_an_encoder_that_shares_logs_nothing(make: Callable[[], Any], client: tensord.Client, lines: Lines) -> None:
    cached(make(), client)
    assert lines() == []
