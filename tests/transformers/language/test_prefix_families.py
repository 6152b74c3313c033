"""prefix_cached with every family of its list: a found prefix gives the bits of a run that computed it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tensord
from tensord.client.transformers import prefix_cached
from tensord.client.transformers.language.caches import empty_cache, needs_snapshots, parts_of
from tensord.client.transformers.language.families import FAMILIES as LISTED
from tensord.client.transformers.language.families import cache_argument

from .language_models import FAMILIES, cache_of, computed, generated, language_model, prompt, same

BLOCK = 16
SHARED = 50
"""Tokens that two prompts have in common; 48 of them end a block."""
PROMPT = 70


@pytest.fixture
def family(request: pytest.FixtureRequest) -> Any:
    return language_model(request.param)


def test_every_family_of_the_list_is_tested() -> None:
    assert set(FAMILIES) == LISTED


@pytest.mark.parametrize("family", sorted(FAMILIES), indirect=True)
def test_a_prompt_that_starts_from_another_ones_prefix_gives_the_bits_of_a_run_without_tensord(
    family: Any, client: tensord.Client
) -> None:
    first = prompt(PROMPT)
    second = prompt(PROMPT - SHARED, 4, first[:, :SHARED])
    exact = needs_snapshots(empty_cache(family))
    shared = prefix_cached(family, client, block_tokens=BLOCK, snapshot_tokens=BLOCK)
    generated(shared, first)
    assert shared.flush()
    found = generated(shared, second)

    # The same parts, one after the other, in one process and without tensord.
    if exact:
        cache = computed(family, first, (16, 32, 48))
        cache = computed(family, second, (64,), cache, 48)
    else:
        cache = cache_of(generated(family, first))
        cache.crop(SHARED - cache.get_seq_length())
    assert same(found, generated(family, second, cache))
    assert (shared.tally.passed, shared.tally.reasons) == (0, {})
    assert shared.tally.found_tokens == (48 if exact else SHARED)


@pytest.mark.parametrize("family", sorted(FAMILIES), indirect=True)
def test_a_conversation_goes_on_from_its_own_answer(family: Any, client: tensord.Client) -> None:
    shared = prefix_cached(family, client, block_tokens=BLOCK, snapshot_tokens=BLOCK)
    first = generated(shared, prompt(PROMPT))
    assert shared.flush()
    follow_up = prompt(9, 3, first.sequences)
    again = generated(shared, follow_up)
    assert shared.tally.found_tokens == first.sequences.shape[1] - 1, "the last token was never an input"
    assert torch.equal(again.sequences, generated(family, follow_up).sequences)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next"], indirect=True)
def test_a_loop_of_ones_own_continues_from_a_stored_cache_bit_for_bit(family: Any, client: tensord.Client) -> None:
    ids = prompt(PROMPT)
    name = cache_argument(family)
    cache = computed(family, ids, (SHARED,))
    shared = prefix_cached(family, client, block_tokens=BLOCK)
    assert shared.store(ids[:, :SHARED], cache)
    # The caller goes on at once, which changes recurrent states in place.
    with torch.no_grad():
        wanted = family(input_ids=ids[:, SHARED:], use_cache=True, **{name: cache}).logits
    assert shared.flush()
    past, found = shared.past_key_values(ids)
    assert found == SHARED
    with torch.no_grad():
        assert torch.equal(family(input_ids=ids[:, found:], use_cache=True, **{name: past}).logits, wanted)


@pytest.mark.parametrize("family", ["mistral", "qwen3_next"], indirect=True)
def test_a_prompt_shorter_than_a_window_or_a_snapshot_is_shared_too(family: Any, client: tensord.Client) -> None:
    shared = prefix_cached(family, client, block_tokens=BLOCK, snapshot_tokens=4)
    ids = prompt(10)
    generated(shared, ids, max_new_tokens=2)
    assert shared.flush()
    again = generated(shared, ids, max_new_tokens=2)
    assert torch.equal(again.sequences, generated(family, ids, max_new_tokens=2).sequences)
    assert shared.tally.found_tokens == (9 if any(part.window for part in parts_of(empty_cache(family))) else 8)
