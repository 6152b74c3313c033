"""Generation from a cache for models whose `generate` does not slice the prompt: state space models, whose caches do
not count tokens.

Owns: the stand-in for the model during such a call. Does not own: the cache. Invariants: the model itself is not
changed; the stand-in shares its modules, weights and settings.
"""

from __future__ import annotations

from functools import cache as remembered
from typing import Any

from .generation import check_parameters

__all__ = ["check_continuing", "continuing"]

_START = "_tensord_start"


def check_continuing(model: Any) -> None:
    """Checks that the model's `generate` can be continued.

    Raises:
        NotShared: a method that the stand-in overrides or calls is missing, or has other parameters.
    """
    check_parameters(model, "_prefill", ("input_ids", "generation_config", "model_kwargs", "is_first_iteration"))
    check_parameters(
        model, "prepare_inputs_for_generation", ("input_ids", "next_sequence_length", "is_first_iteration")
    )


def continuing(model: Any, start: int) -> Any:
    """A stand-in for the model, whose `generate` computes the prompt from the token `start` on."""
    plain: type = type(model)
    stand_in: Any = object.__new__(_continuing_class(plain))
    vars(stand_in).update(vars(model))
    vars(stand_in)[_START] = start
    return stand_in


@remembered
def _continuing_class(plain: type) -> type:
    def prefill(
        self: Any, input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any], is_first_iteration: bool = True
    ) -> Any:
        inputs = self.prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=input_ids.shape[1] - vars(self)[_START],
            is_first_iteration=is_first_iteration,
            **model_kwargs,
        )
        return self(**inputs, return_dict=True)

    # transformers knows its classes by their names.
    body = {"_prefill": prefill, "__module__": plain.__module__, "__qualname__": plain.__qualname__}
    return type(plain.__name__, (plain,), body)
