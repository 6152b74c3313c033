"""Wraps a pipeline, so that a call of its `encode_prompt` reads the stored embeddings or has them encoded once.

Owns: wrapping and unwrapping, the conditions on the arguments, the form in which embeddings are stored. Does not own:
the name of the pipeline (names), claims (client/computing/once.py).

Invariants: only exceptions of the pipeline are raised. A result has the types, dtypes and bytes that the pipeline
returned to the process that encoded, and memory of its own. After any failure, a missing daemon included, the pipeline
encodes as usual. Copies and pickles of a pipeline contain no part of the wrapper.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch

from ...errors import UsageError
from ..arguments.namespace import Namespace
from ..core.client import Client, check_client
from ..identity.described import described, digest_of
from ..identity.modules import Fingerprint
from ..transformers.reasons import NotShared, Reasons
from ..transformers.wrapping import plain_class, wrapped_class
from .names import PIPELINES, check_pipeline, name_of

Pipeline = TypeVar("Pipeline")
_KIND: Final = "diffusers"
_NOTHING: Final = object()


@dataclass(slots=True)
class PromptTally:
    """Counts of calls.

    Attributes:
        found: calls whose embeddings another call had stored, or stored while this one waited.
        encoded: calls that encoded, and stored.
        passed: calls that bypassed the cache.
        reasons: why calls bypassed the cache, with the number of calls. A reason that is known from the beginning is
            there before the first call.
    """

    found: int = 0
    encoded: int = 0
    passed: int = 0
    reasons: Reasons = field(default_factory=Reasons)


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
    wrapped.__class__ = wrapped_class(plain, "encode_prompt")
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


class Prompts:
    """The wrapper of one pipeline's `encode_prompt`. Keeps no reference to the pipeline. Thread-safe.

    `plain` is the pipeline's own class. The other arguments are those of `cached_prompts`.
    """

    def __init__(self, plain: type, client: Client, tenant: str) -> None:
        self.tally = PromptTally()
        self._plain = plain
        self._client = check_client(client)
        # Refuses a wrong tenant now rather than at the first call.
        self._tenant = Namespace(model="none", revision="none", dtype="none", processor="none", tenant=tenant).tenant
        self._fingerprint = Fingerprint()

    def __call__(self, pipeline: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the pipeline's method for these arguments."""
        original: Any = self._plain.encode_prompt  # type: ignore[attr-defined]
        try:
            key, device = self._key(original, pipeline, args, kwargs)
        except Exception as error:
            self._passed(error)
            return original(pipeline, *args, **kwargs)
        made: Any = _NOTHING
        failed = False

        def compute() -> Any:
            nonlocal made, failed
            try:
                made = original(pipeline, *args, **kwargs)
            except BaseException:
                failed = True
                raise
            if self._key(original, pipeline, args, kwargs) != (key, device):
                raise NotShared(
                    "the pipeline's weights or settings changed, or its namespace was invalidated meanwhile"
                )
            return _stored(made)

        try:
            tree = self._client.get_or_compute(key, compute)
            if made is not _NOTHING:
                self.tally.encoded += 1
                return made
            found = _result(tree, device)
            self.tally.found += 1
            return found
        except Exception as error:
            if failed:
                raise
            self._passed(error)
            return original(pipeline, *args, **kwargs) if made is _NOTHING else made

    def _key(self, original: Any, pipeline: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, Any]:
        """The key of a call, and the device of its result.

        Raises:
            NotShared: the call has to bypass the cache.
        """
        bound = inspect.signature(original).bind(pipeline, *args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        del given["self"]
        if given.get("lora_scale") is not None:
            raise NotShared("lora_scale is given: it scales the adapters in the text encoders")
        # encode_prompt of every pipeline encodes on this device if none is given.
        device = torch.device(given.pop("device", None) or pipeline._execution_device)
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                raise NotShared(f"{name} is given: embeddings of the caller's own have no name")
        said = digest_of(described(given)).encode()
        namespace = name_of(pipeline, self._plain, device, self._fingerprint, self._tenant)
        return self._client.current(namespace).key(_KIND, "text", said), device

    def _passed(self, error: Exception) -> None:
        self.tally.passed += 1
        self.tally.reasons.add(error, "a prompt is encoded without the cache")


def _stored(result: Any) -> list[Any]:
    """The form in which a result is stored: a list of tensors and None.

    Raises:
        NotShared: the result has another form.
    """
    if type(result) is not tuple or not all(each is None or type(each) is torch.Tensor for each in result):
        raise NotShared("encode_prompt returned something other than a tuple of tensors")
    return [None if each is None else each.detach().cpu() for each in result]


def _result(tree: Any, device: Any) -> tuple[Any, ...]:
    """The result of a stored form, on a device.

    Raises:
        NotShared: the form is of another program.
    """
    if type(tree) is not list or not all(each is None or type(each) is torch.Tensor for each in tree):
        raise NotShared("the stored embeddings are not those of a pipeline")
    return tuple(None if each is None else each.to(device) for each in tree)
