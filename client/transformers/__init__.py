"""transformers' image and audio encoders, through the cache: one process on the host encodes, the others read.

Owns: how a model is wrapped, and unwrapped. Does not own where families are patched (patch_points), what becomes of a
call (calls), how its output is taken apart (outputs), nor what names weights and settings (identity).

Invariants: what is returned has the types of the unwrapped model's output, and memory of its own. Whatever fails in
between, a missing daemon included, the model just computes. A model's state, copies and pickles know nothing of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache as remembered
from functools import update_wrapper
from typing import Any, TypeVar

import torch

from ...errors import UsageError
from ..core.cache import Client
from ..core.namespace import Namespace
from .calls import Encoder, EncoderTally
from .patch_points import PATCH_POINTS, PatchPoint

__all__ = ["EncoderTally", "cached", "refresh", "tally", "uncached"]

Model = TypeVar("Model")


def cached(model: Model, cache: Client, namespace: Namespace | None = None, *, exact: bool = False) -> Model:
    """Has the model's image and audio encoders go through the cache. Changes the model, and returns it.

    Keys are of the bytes that the encoder is given, item by item, of its configuration and weights, and of what else
    changes bits on a machine: versions, device, threads, autocast. Calls go through untouched that need gradients, run
    in training mode, are being compiled or traced, have an argument that no key can hold or an output that cannot be
    taken apart; and all calls of an encoder that others had their hands in, by hooks, adapters or other modules than
    torch's and transformers'. Wrapping a wrapped model gives it the new cache, namespace and `exact`.

    Args:
        model: a transformers model, or a part of one, of a family that `patch_points` has.
        namespace: to keep tenants apart, or to `Client.invalidate`; the weights' fingerprint is part of each key
            anyway. Without it: the encoder's class and fingerprint.
        exact: look up and encode whole calls, not items. The bits of an item may depend on how many are encoded with
            it; so outputs equal the unwrapped model's whatever the model, and one miss encodes the whole batch.

    Raises:
        UsageError: there is no such encoder in it, or one that another library has wrapped.
    """
    found = list(_modules_of(model))
    if not found:
        raise UsageError(f"{type(model).__name__} has no encoder that is known here: {', '.join(sorted(PATCH_POINTS))}")
    for module, point in found:
        if point.method in vars(module):
            raise UsageError(
                f"{type(module).__name__}.{point.method} was replaced in this instance, as accelerate's hooks do it; "
                "call cached() before that"
            )
    for module, point in found:
        plain = _plain_class(module)
        module.__class__ = _wrapped_class(plain, point)
        module._tensord = Encoder(plain, point, cache, namespace, exact=exact)
        # What is replaced from now on is noticed; an encoder that has something replaced in it already is left alone.
        with suppress(Exception):
            module._tensord.functions(module._tensord.modules(module))
    return model


def uncached(model: Model) -> Model:
    """Takes back what `cached` did. Changes the model, and returns it; one that is not wrapped stays as it is."""
    for module in _wrapped_modules(model):
        module.__class__ = _plain_class(module)
        del module._tensord
    return model


def refresh(model: Model) -> Model:
    """Has the weights' fingerprint taken anew at the next call. Needed only after writes that `weights` cannot see."""
    for module in _wrapped_modules(model):
        module._tensord.refresh()
    return model


def tally(model: Any) -> EncoderTally:
    """What the model's wrapped encoders did so far, in this process."""
    total = EncoderTally()
    for module in _wrapped_modules(model):
        total.add(module._tensord.tally)
    return total


def _modules_of(model: Any) -> Iterator[tuple[Any, PatchPoint]]:
    """The outermost modules with a seam: within one that is wrapped, nothing else needs to be."""
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


def _plain_class(module: Any) -> type:
    kind = type(module)
    plain: type = kind.__dict__.get("_tensord_plain", kind)
    return plain


@remembered
def _wrapped_class(plain: type, point: PatchPoint) -> type:
    """A class of the same name, by which transformers knows its classes too, that asks the cache first.

    A class and no attribute of the instance: a copied attribute would go on calling the module it was made for.
    """
    original: Any = getattr(plain, point.method)
    jit: Any = torch.jit

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        encoder: Encoder | None = vars(self).get("_tensord")
        if encoder is None or torch.compiler.is_compiling() or jit.is_tracing():
            return getattr(plain, point.method)(self, *args, **kwargs)
        return encoder(self, args, kwargs)

    def reduced(self: Any, protocol: Any) -> Any:
        # Copies and pickles are of the plain model: a client is no part of it, and this class cannot be imported.
        state = {name: value for name, value in vars(self).items() if name != "_tensord"}
        return _empty, (plain,), state

    # The signature and the documentation are the original's.
    update_wrapper(method, original)
    body = {
        point.method: method,
        "__reduce_ex__": reduced,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "_tensord_plain": plain,
    }
    return type(plain.__name__, (plain,), body)


def _empty(plain: type) -> Any:
    """An instance that is yet to be given its state."""
    return object.__new__(plain)
