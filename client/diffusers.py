"""diffusers' prompt embeddings through the cache: one process of the host encodes a prompt, the others read the result.

It may import the core, the identity and the parts of the transformers adapter that watch a model. It owns the wrapper
around a pipeline's `encode_prompt`, the name of a pipeline, the key of a call, and the form in which embeddings are
stored. Does not own: names of weights and settings of text encoders (identity), claims (computing/once.py).

Invariants: two pipelines with equal names encode equal prompts to equal embeddings; what has no name bypasses the
cache. Only exceptions of the pipeline are raised. A result has the types, dtypes and bytes that the pipeline returned
to the process that encoded, and memory of its own. After any failure, a missing daemon included, the pipeline encodes
as usual. Copies and pickles of a pipeline contain no part of the wrapper.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final, TypeVar

import diffusers
import torch
import transformers

from ..errors import UsageError
from .arguments.namespace import Namespace
from .core.client import Client, check_client
from .identity.described import described, digest_of
from .identity.modules import Fingerprint
from .identity.settings import LIBRARIES, is_from
from .transformers.conditions import NotShared, Reasons, state_of
from .transformers.wrapping import plain_class, unwrap, wrap

__all__ = ["PromptTally", "cached_prompts", "tally", "uncached_prompts"]

VERSION: Final = "0.42."
"""The version of diffusers whose pipelines are known."""
PIPELINES: Final = frozenset(
    f"{family}{task}Pipeline"
    for family in ("Flux", "StableDiffusion", "StableDiffusion3", "StableDiffusionXL")
    for task in ("", "Img2Img", "Inpaint")
)
Pipeline = TypeVar("Pipeline")
_ENCODERS: Final = ("text_encoder", "text_encoder_2", "text_encoder_3")
_TOKENIZERS: Final = ("tokenizer", "tokenizer_2", "tokenizer_3")
_METHODS: Final = ("encode_prompt", "_get_clip_prompt_embeds", "_get_t5_prompt_embeds", "maybe_convert_prompt")
_FROM: Final = LIBRARIES | {"diffusers"}
_FUNCTIONS: Final = (FunctionType, MethodType, BuiltinFunctionType)
_PLAIN: Final = (bool, int, float, str, type(None))
_UNSAID: Final = frozenset(
    {
        *("_in_target_context_manager", "_tokenizer", "deprecation_warnings", "files_loaded", "init_inputs"),
        *("init_kwargs", "name_or_path", "verbose"),
    }
)
"""Attributes of a tokenizer that are records, paths, or named in another way."""


@dataclass(slots=True)
class PromptTally:
    """Counts of calls.

    Attributes:
        found: calls whose embeddings another call had stored, or stored while this one waited.
        encoded: calls that encoded, and stored.
        passed: calls that bypassed the cache.
        reasons: why they did, with the number of calls. A reason that is known from the beginning is there before.
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
    prompts = _Prompts(plain, client, tenant)
    wrap(pipeline, "encode_prompt", prompts)
    try:
        _check_pipeline(pipeline, plain)
    except Exception as error:
        prompts.tally.reasons.tell(error, f"prompts of {plain.__name__} are not shared")
    return pipeline


def uncached_prompts(pipeline: Pipeline) -> Pipeline:
    """Removes the wrapper of `cached_prompts`, if there is one. Changes the pipeline, and returns it."""
    unwrap(pipeline)
    return pipeline


def tally(pipeline: Any) -> PromptTally:
    """Counts of the pipeline's calls in this process so far."""
    prompts: _Prompts | None = vars(pipeline).get("_tensord")
    return PromptTally() if prompts is None else prompts.tally


class _Prompts:
    """The wrapper of one pipeline's `encode_prompt`. Keeps no reference to the pipeline. Thread-safe.

    `plain` is the pipeline's own class. The other arguments are those of `cached_prompts`.
    """

    def __init__(self, plain: Any, client: Client, tenant: str) -> None:
        self.tally = PromptTally()
        self._plain = plain
        self._client = check_client(client)
        # Refuses a wrong tenant now rather than at the first call.
        self._tenant = Namespace(model="none", revision="none", dtype="none", processor="none", tenant=tenant).tenant
        self._fingerprint = Fingerprint()

    def __call__(self, pipeline: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made: list[Any] = []
        has_failed = False

        def encode() -> Any:
            nonlocal has_failed
            has_failed = True
            made.append(self._plain.encode_prompt(pipeline, *args, **kwargs))
            has_failed = False
            return made[0]

        def compute() -> Any:
            result = encode()
            if self._key(pipeline, args, kwargs) != (key, device):
                raise NotShared("the pipeline changed, or its namespace was invalidated meanwhile")
            if type(result) is not tuple or not _are_embeddings(result):
                raise NotShared("encode_prompt returned something other than a tuple of tensors")
            return [None if each is None else each.detach().cpu() for each in result]

        try:
            key, device = self._key(pipeline, args, kwargs)
            tree = self._client.get_or_compute(key, compute)
            if made:
                self.tally.encoded += 1
                return made[0]
            if type(tree) is not list or not _are_embeddings(tree):
                raise NotShared("the stored embeddings are not those of a pipeline")
            found = tuple(None if each is None else each.to(device) for each in tree)
            self.tally.found += 1
            return found
        except Exception as error:
            if has_failed:
                raise
            self.tally.passed += 1
            self.tally.reasons.add(error, "a prompt is encoded without the cache")
            return made[0] if made else encode()

    def _key(self, pipeline: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, Any]:
        """The key of a call, and the device of its result. Raises NotShared if the call has to bypass the cache."""
        bound = inspect.signature(self._plain.encode_prompt).bind(pipeline, *args, **kwargs)
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
        namespace = self._client.current(self._name(pipeline, device))
        return namespace.key("diffusers", "text", digest_of(described(given)).encode()), device

    def _name(self, pipeline: Any, device: torch.device) -> Namespace:
        """The namespace of the pipeline's prompt embeddings on a device. Raises NotShared or UnsupportedLeaf."""
        _check_pipeline(pipeline, self._plain)
        encoders = _parts(pipeline, _ENCODERS)
        config = {name: value for name, value in pipeline.config.items() if type(value) in _PLAIN}
        config.pop("_name_or_path", None)
        others = {name: str(part.dtype) for name, part in _parts(pipeline, ("unet", "transformer")).items()}
        parts = [
            state_of(encoders, torch.empty(0, device=device), self._fingerprint),
            {name: _tokenizer(part) for name, part in _parts(pipeline, _TOKENIZERS).items()},
            [config, others, getattr(pipeline, "tokenizer_max_length", None)],
        ]
        return Namespace(
            model=f"{self._plain.__module__}.{self._plain.__qualname__}",
            revision=digest_of(parts),
            dtype=",".join(str(encoder.dtype) for encoder in encoders.values()) or "none",
            processor=f"diffusers {diffusers.__version__}, transformers {transformers.__version__}",
            tenant=self._tenant,
        )


def _check_pipeline(pipeline: Any, plain: type) -> None:
    """Raises NotShared unless the version of diffusers is known, and the code which encodes is diffusers' own."""
    if not diffusers.__version__.startswith(VERSION):
        raise NotShared(f"diffusers {diffusers.__version__} is installed; prompts are shared with {VERSION}x only")
    for name in _METHODS:
        method = inspect.getattr_static(plain, name, None)
        if name in vars(pipeline) or (method is not None and not is_from(method, _FROM)):
            raise NotShared(f"{plain.__name__}.{name} was replaced by other code")


def _parts(pipeline: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: part for name in names if (part := getattr(pipeline, name, None)) is not None}


def _are_embeddings(values: Any) -> bool:
    return all(each is None or type(each) is torch.Tensor for each in values)


def _tokenizer(tokenizer: Any) -> str:
    """SHA-256, as hex text, over all that a tokenizer's output depends on. Raises NotShared if it is not one of
    transformers' tokenizers with a backend in Rust, or has an attribute without a text form."""
    kind = type(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not kind.__module__.startswith("transformers.") or backend is None or not is_from(kind.__call__):
        raise NotShared(f"a {kind.__name__} is not one of transformers' tokenizers with a backend")
    model = json.loads(backend.to_str())
    # Every call sets these two anew, from its arguments.
    del model["truncation"], model["padding"]
    own = {name: value for name, value in vars(tokenizer).items() if name not in _UNSAID}
    return digest_of([f"{kind.__module__}.{kind.__qualname__}", model, described(own, _object)])


def _object(value: Any) -> Any:
    """A tokenizer's attribute, or a part of one, that is an object of the libraries."""
    if isinstance(value, _FUNCTIONS) or not is_from(type(value), _FROM | {"tokenizers"}):
        raise NotShared(f"a tokenizer has an attribute of {type(value).__name__}, which cannot be part of a name")
    return f"{type(value).__name__} {value}"
