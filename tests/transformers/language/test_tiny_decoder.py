"""The example's decoder: transformers computes what its page of code computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_transformers_runs_the_same_model_from_a_cached_prefix_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import tiny_decoder

    tokens = np.array(tiny_decoder.tokens_of("Its keys and values are those of the others. " * 4))
    ours, theirs = tiny_decoder.decoder("numpy"), tiny_decoder.decoder("transformers")
    keys, logits = ours.forward(ours.embed(tokens), [])
    past, _ = theirs.forward(theirs.embed(tokens[:100]), [])
    again, continued = theirs.forward(theirs.embed(tokens[100:]), past)
    assert np.allclose(logits, continued.numpy(), atol=1e-4)
    for mine, other in zip(keys, again, strict=True):
        for one, another in zip(mine, other, strict=True):
            assert np.allclose(one, another.numpy(), atol=1e-4)
