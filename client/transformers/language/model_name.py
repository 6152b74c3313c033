"""Names a language model as it is at a call: everything that its keys and values depend on besides the tokens.

Owns: the parts of this name, and the checks without which there is none. Does not own: single parts (identity,
conditions).

Invariants: two models with equal names compute the same keys and values for the same tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from ...arguments.namespace import Namespace
from ...identity.described import digest_of
from ...identity.modules import Fingerprint
from ..conditions import state_of
from .families import check_family


def name_of(model: Any, input_ids: torch.Tensor, fingerprint: Fingerprint, tenant: str) -> Namespace:
    """The namespace of the model's keys and values.

    Args:
        input_ids: the prompt, on the device that the model computes on.
        fingerprint: of the model's weights; keeps their hash from call to call.

    Raises:
        NotShared, UnsupportedLeaf: there is no name, because something in the model has none.
    """
    check_family(model)
    # `generate` computes without gradients.
    with torch.no_grad():
        state = state_of({"": model}, input_ids, fingerprint)
    return Namespace(
        model=f"{type(model).__module__}.{type(model).__qualname__}",
        revision=digest_of(state),
        dtype=str(model.dtype),
        processor=f"transformers {transformers.__version__}",
        tenant=tenant,
    )
