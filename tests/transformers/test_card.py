"""transformers on a real card. Skipped where there is none.

Owns: what only a card can show. The other tests have what holds on any device.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import tensord
from tensord.client.transformers import cached, tally

from .language.language_models import FAMILIES, PROMPT, generated, language_model, prompt, sharing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or HIP card")

# The first attention of a process, before and after.
FIRST_ATTENTION = """
import torch
from tensord.client.identity.settings import machine
card = torch.device("cuda", 0)
before = machine(card)
states = torch.rand(1, 1, 8, 64, device=card, dtype=torch.float16)
torch.nn.functional.scaled_dot_product_attention(states, states, states)
assert machine(card) == before, (before, machine(card))
"""


def test_the_first_attention_of_a_process_changes_no_name() -> None:
    subprocess.run([sys.executable, "-c", FIRST_ATTENTION], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def test_an_encoder_on_a_card_finds_its_own_output_bit_for_bit(client: tensord.Client) -> None:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    small = CLIPVisionConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=64, num_attention_heads=4)
    model = CLIPVisionModel(small).eval().cuda()
    cached(model, client)
    pixels = torch.rand(2, 3, 224, 224, device="cuda")
    first = model(pixel_values=pixels).last_hidden_state
    again = model(pixel_values=pixels).last_hidden_state
    assert (tally(model).encoded, tally(model).found) == (2, 2)
    assert again.device == first.device
    assert torch.equal(again, first)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_prefix_on_a_card_is_found_and_gives_the_same_tokens(family: str, client: tensord.Client) -> None:
    model = language_model(family).cuda()
    wanted = generated(model, prompt(PROMPT).cuda()).sequences
    shared = sharing(model, client)
    found = generated(shared, prompt(PROMPT).cuda()).sequences
    assert shared.tally.found_tokens > 0, shared.tally.reasons
    assert found.device == wanted.device
    assert torch.equal(found, wanted)
