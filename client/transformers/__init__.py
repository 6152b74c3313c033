"""transformers' models through the cache. `cached`: image and audio encoders, of which one process of the host encodes
and the others read. `prefix_cached`: language models, whose prompts start from the longest prefix that was computed.

Owns: wrapping and unwrapping an encoder. Does not own: the patched methods (patch_points), the handling of a call
(calls), splitting an output (outputs), names of weights and settings (identity), prefixes (prefix).

Invariants: outputs have the types of the unwrapped model's outputs, and memory of their own. After any failure, a
missing daemon included, the model computes as usual. A model's state, copies and pickles contain no part of the
wrapper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from typing import Any, TypeVar

import torch

from ...errors import UsageError
from ..arguments.namespace import Namespace
from ..core.client import Client
from .calls import Encoder, EncoderTally
from .language.prefix import Past, PrefixCached, PrefixTally, prefix_cached
from .patch_points import PATCH_POINTS, PatchPoint
from .wrapping import plain_class, unwrap, wrap

__all__ = ["EncoderTally", "Past", "PrefixCached", "PrefixTally", "cached", "prefix_cached", "tally", "uncached"]

Model = TypeVar("Model")


def cached(model: Model, cache: Client, namespace: Namespace | None = None) -> Model:
    """Routes the model's image and audio encoders through the cache. Changes the model, and returns it.

    A key covers the bytes of the encoder's input, item by item, the encoder's configuration and weights, and other
    causes of different bits: versions, device, threads, autocast. Some calls bypass the cache: calls that need
    gradients, run in training mode, are being compiled or traced, have an argument that no key can contain, or an
    output that cannot be split; and all calls of an encoder that other code has changed, by hooks, adapters or modules
    other than torch's and transformers'. Wrapping a wrapped model sets the new cache and namespace. The log
    has each reason once, and at once if no call can be shared with the installed transformers.

    Args:
        model: a transformers model, or a part of one, of a family in `patch_points`.
        namespace: separates tenants, and can be passed to `Client.invalidate`. By default it is made from the encoder's
            class and fingerprint. Each key contains the weights' fingerprint in any case.

    Raises:
        UsageError: the model has no supported encoder, or another library has wrapped the encoder.
    """
    found = list(_modules_of(model))
    if not found:
        raise UsageError(f"{type(model).__name__} has no supported encoder ({', '.join(sorted(PATCH_POINTS))})")
    for module, point in found:
        if point.method in vars(module):
            raise UsageError(
                f"{type(module).__name__}.{point.method} was replaced in this instance, as by accelerate's hooks; "
                "call cached() before that"
            )
    for module, point in found:
        encoder = Encoder(plain_class(module), point, cache, namespace)
        wrap(module, point.method, encoder)
        encoder.check(module)
    return model


def uncached(model: Model) -> Model:
    """Removes the wrapper of `cached`. Changes the model, and returns it. A model without a wrapper stays as it is."""
    for module in _wrapped_modules(model):
        unwrap(module)
    return model


def tally(model: Any) -> EncoderTally:
    """Counts of the model's wrapped encoders in this process so far."""
    tallies = [astuple(module._tensord.tally) for module in _wrapped_modules(model)]
    return EncoderTally(*map(sum, zip(*tallies, strict=True)))


def _modules_of(model: Any) -> Iterator[tuple[Any, PatchPoint]]:
    """The outermost modules with a patch point. Modules within them need no wrapper."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model is a {type(model).__name__}; give a transformers model, a torch.nn.Module")
    point = PATCH_POINTS.get(type(model).__name__)
    if point is not None and type(model).__module__.startswith("transformers."):
        yield model, point
        return
    for child in model.children():
        yield from _modules_of(child)


def _wrapped_modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if "_tensord" in vars(module)]
