"""Wraps a pipeline of diffusers, so that its `encode_prompt` goes through the cache.

Owns: wrapping and unwrapping. Does not own: the handling of a call (prompts), names of pipelines and tokenizers
(names).

Invariants: `encode_prompt` returns what the unwrapped pipeline returns, in memory of its own. After any failure, a
missing daemon included, the pipeline encodes as usual. Copies and pickles of a pipeline contain no part of the wrapper.
"""

from __future__ import annotations

from typing import Any, TypeVar

from ...errors import UsageError
from ..core.client import Client
from ..transformers.wrapping import plain_class, wrapped_class
from .names import PIPELINES, check_pipeline
from .prompts import Prompts, PromptTally

Pipeline = TypeVar("Pipeline")
_METHOD = "encode_prompt"


def cached_prompts(pipeline: Pipeline, client: Client, *, tenant: str = "") -> Pipeline:
    """Routes the pipeline's `encode_prompt` through the cache. Changes the pipeline, and returns it.

    A key covers the prompts and all other arguments, the text encoders' weights and settings, the tokenizers, the
    pipeline's settings, versions and device. A call with an argument that no key can contain, such as embeddings of the
    caller's own, bypasses the cache. Wrapping a wrapped pipeline sets the new client and tenant. One line in
    the log says why, if no call can be shared with the installed diffusers.

    Args:
        pipeline: a pipeline of diffusers of a class in docs/diffusers.md.
        client: the client whose daemon keeps the embeddings.
        tenant: a salt that makes a tenant's embeddings its own.

    Raises:
        UsageError: the pipeline is of another class, or `client` is no Client.
        BadNamespace: `tenant` is no text.
    """
    plain = plain_class(pipeline)
    if plain.__name__ not in PIPELINES or not plain.__module__.startswith("diffusers."):
        raise UsageError(f"a {plain.__name__} has no supported encode_prompt ({', '.join(sorted(PIPELINES))})")
    prompts = Prompts(plain, client, tenant)
    wrapped: Any = pipeline
    wrapped.__class__ = wrapped_class(plain, _METHOD)
    vars(wrapped)["_tensord"] = prompts
    try:
        check_pipeline(pipeline, plain)
    except Exception as error:
        prompts.tally.reasons.tell(error, f"prompts of {plain.__name__} are not shared")
    return pipeline


def uncached_prompts(pipeline: Pipeline) -> Pipeline:
    """Removes the wrapper of `cached_prompts`. Changes the pipeline, and returns it. A pipeline without a wrapper stays
    as it is."""
    wrapped: Any = pipeline
    wrapped.__class__ = plain_class(pipeline)
    vars(wrapped).pop("_tensord", None)
    return pipeline


def tally(pipeline: Any) -> PromptTally:
    """Counts of the pipeline's calls in this process so far."""
    prompts: Prompts | None = vars(pipeline).get("_tensord")
    return PromptTally() if prompts is None else prompts.tally
