"""A call of a wrapped encoder: what its items' keys are, which are found, which are encoded, and by whom.

Owns: what of a call makes a key, when a call goes through untouched, and the order of look-up, claim, encoding, store
and waiting. Does not own the pieces of an output (outputs), nor what names the weights (weights).

Invariants: no claim outlives its call. While others encode something, what is ours to encode is encoded first; so two
calls that want the same items in any order wait for each other only forwards. Nothing is raised but what the model
raises.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final

import torch
import torch.nn.modules.module as _modules
import transformers

from ...errors import LimitReached, TensordError, TimedOut
from ..cache import Client
from ..claim import Claim
from ..lease import Lease
from ..namespace import Namespace
from ..puts import Put
from .outputs import Batch, NotSplittable
from .seams import Seam
from .weights import Fingerprint, tensor_bytes, tensors_of

__all__ = ["Encoder", "Tally"]

Arguments = dict[str, Any]
Part = Any
"""An item's share of an output, as `Batch.split` gives it."""

_KIND: Final = "transformers"
_ANSWER_S: Final = 0.1
"""How long the daemon may take to say who encodes. It takes a round trip; only where it hangs, this is waited."""
_PUT_S: Final = 1.0
"""How long room in the inbox may take for all items of a call; without it they are not stored."""
_STORED_S: Final = 0.1
"""How long the daemon may take to say what became of a call's puts. It is told as soon as they are copied."""
_PAUSE_S_MIN: Final = 0.0001
_PAUSE_S_MAX: Final = 0.005
_EVERYWHERE: Final = (_modules._global_forward_hooks, _modules._global_forward_pre_hooks)
"""Hooks that run with each module there is. torch changes these, and never replaces them."""
_UNSAID: Final = frozenset(
    {"_name_or_path", "architectures", "dtype", "text_config", "torch_dtype", "transformers_version"}
)
"""Of a configuration: what makes no difference to an encoder's output, or stands elsewhere in the key."""


@dataclass(slots=True)
class Tally:
    """What became of items: found, waited for while another process encoded them, and encoded here; and how many calls
    went through untouched."""

    found: int = 0
    waited: int = 0
    encoded: int = 0
    passed: int = 0

    def add(self, other: Tally) -> None:
        """Sums another one up into this."""
        self.found += other.found
        self.waited += other.waited
        self.encoded += other.encoded
        self.passed += other.passed


class _Untouchable(Exception):
    """The call has to go through as it is."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One call's items, in their order. Where something is asked for some of them, it is by their positions."""

    keys: list[bytes]
    whole: Callable[[], Any]
    """The output of all, as the model gives it."""
    encode: Callable[[Sequence[int]], Any]
    """The output of some."""
    batch: Callable[[Sequence[int]], Batch]
    device: Any


class Encoder:
    """How one module is wrapped: from a call's arguments to its output. Keeps no reference to the module.

    `plain` is the module's own class. The other arguments are those of `cached`.
    """

    def __init__(self, plain: type, seam: Seam, cache: Client, namespace: Namespace | None, *, exact: bool) -> None:
        self.tally = Tally()
        self._seam = seam
        self._cache = cache
        self._namespace = namespace
        self._exact = exact
        self._name = f"{plain.__module__}.{plain.__qualname__}"
        self._plain = plain
        self._signature = inspect.signature(self._original)
        self._modules = ("transformers.modeling_outputs", *(base.__module__ for base in plain.__mro__))
        self._fingerprint = Fingerprint()

    @property
    def _original(self) -> Any:
        """The class's method as it is now: whoever patches it does not know of us."""
        return getattr(self._plain, self._seam.method)

    def refresh(self) -> None:
        """Has the weights' fingerprint taken anew."""
        self._fingerprint.forget()

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        """The output of the module's method for these arguments."""
        try:
            call = self._prepared(module, args, kwargs)
        except Exception:
            # What is wrong with the arguments, the model says best; and what is wrong with us is not its caller's.
            self.tally.passed += 1
            return self._original(module, *args, **kwargs)
        parts: dict[bytes, Part] = {}
        for key in call.keys:
            part = self._found(key)
            if part is not None:
                parts[key] = part
                self.tally.found += 1
        try:
            if len(parts) < len(call.keys) and (missing := _firsts(call.keys, parts)):
                output = self._completed(call, parts, missing)
                if output is not None:
                    return output
            everything = call.batch(range(len(call.keys)))
            return everything.join([parts[key] for key in call.keys], call.device)
        except TensordError:
            # It cannot be taken apart, or what was found is no output of this model.
            self.tally.passed += 1
            return call.whole()

    # ---- look up, claim, encode, wait

    def _completed(self, call: _Call, parts: dict[bytes, Part], missing: dict[bytes, int]) -> Any:
        """Adds the parts that are missing, encoded here, or elsewhere by who was first.

        Args:
            missing: keys, with the position of each.

        Returns:
            The whole output where all of it was encoded; None where it is to be put together.

        Raises:
            NotSplittable: an output that cannot be taken apart.
        """
        claims = {key: self._cache.claim(key) for key in missing}
        try:
            ours = self._granted(claims)
            if len(ours) == len(missing) and not parts:
                # As the model does it, items that are there twice included: bit for bit what it is without us.
                output = call.whole()
                self.tally.encoded += len(call.keys)
                try:
                    split = call.batch(range(len(call.keys))).split(output)
                    self._store(dict(zip(call.keys, split, strict=True)), claims)
                except NotSplittable:
                    self.tally.encoded -= len(call.keys)
                    self.tally.passed += 1
                return output
            self._encode(call, {key: missing[key] for key in ours}, parts, claims)
            theirs = {key: claim for key, claim in claims.items() if key not in parts}
            left = self._awaited(theirs, parts)
            self._encode(call, {key: missing[key] for key in left}, parts, claims)
            return None
        finally:
            for claim in claims.values():
                claim.abandon()

    def _encode(
        self, call: _Call, chosen: dict[bytes, int], parts: dict[bytes, Part], claims: dict[bytes, Claim]
    ) -> None:
        if not chosen:
            return
        positions = list(chosen.values())
        split = dict(zip(chosen, call.batch(positions).split(call.encode(positions)), strict=True))
        self.tally.encoded += len(split)
        self._store(split, claims)
        parts.update(split)

    def _granted(self, claims: dict[bytes, Claim]) -> list[bytes]:
        """Keys that nobody else computes. Waits until it is known for all, within reason."""
        deadline = time.monotonic() + _ANSWER_S
        while any(claim.state == "asked" for claim in claims.values()) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S_MIN)
        return [key for key, claim in claims.items() if claim.state not in ("waiting", "hit")]

    def _awaited(self, claims: dict[bytes, Claim], parts: dict[bytes, Part]) -> list[bytes]:
        """Adds what others encode, as it is stored, and gives the keys that have to be encoded here all the same."""
        deadline = time.monotonic() + self._cache.timeout_s
        pause_s = _PAUSE_S_MIN
        left = []
        waiting = dict(claims)
        while waiting:
            for key, claim in list(waiting.items()):
                state = claim.state
                late = time.monotonic() >= deadline
                if state in ("asked", "waiting") and not late:
                    continue
                del waiting[key]
                part = self._found(key) if state == "hit" or late else None
                if part is None:
                    left.append(key)
                else:
                    parts[key] = part
                    self.tally.waited += 1
            if waiting:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)
        return left

    def _found(self, key: bytes) -> Part | None:
        """Over the ring's own memory, which it keeps: joining copies."""
        lease: Lease | None = self._cache.get(key)
        try:
            return None if lease is None else lease.torch(copy=False)
        except TensordError:
            return None

    def _store(self, split: dict[bytes, Part], claims: dict[bytes, Claim]) -> None:
        """Stores the parts, and ends their claims by what became of each."""
        puts = self._sent(split)
        deadline = time.monotonic() + _STORED_S
        for put in puts:
            # A put ends the claim of its key only where it succeeds: whoever waits for another one has to be told.
            if claims[put.key].state == "compute":
                with suppress(TensordError):
                    put.wait(max(0.0, deadline - time.monotonic()))
        for key in split:
            if self._cache.contains(key):
                claims[key].stored()
            else:
                claims[key].abandon()

    def _sent(self, split: dict[bytes, Part]) -> list[Put]:
        """The puts that are on their way; after one that found no room, no more are tried."""
        deadline = time.monotonic() + _PUT_S
        puts = []
        for key, part in split.items():
            try:
                put = self._cache.put(key, part, timeout_s=max(0.0, deadline - time.monotonic()))
            except TensordError:
                continue
            if put.state != "lost":
                puts.append(put)
            elif isinstance(put.error, TimedOut | LimitReached):
                break
        return puts

    # ---- what a call is about

    def _prepared(self, module: Any, args: tuple[Any, ...], kwargs: Arguments) -> _Call:
        """The call's items.

        Raises:
            _Untouchable: it has to go through as it is.
        """
        seam = self._seam
        given = self._arguments(module, args, kwargs)
        items = _plain(given.get(seam.items))
        parts = {name: getattr(module, name) for name in seam.parts} or {"": module}
        if not _is_theirs_inside(self._original):
            raise _Untouchable
        _check_still(items, parts.values())
        if given.get("return_dict") is False or getattr(module.config, "return_dict", True) is False:
            # A bare tuple does not say what its lists are.
            raise _Untouchable
        rows, beside = self._rows(given, items)
        said = {name: value for name, value in given.items() if name not in (seam.items, seam.grid, seam.beside)}
        said.pop("return_dict", None)
        described = _described({name: value for name, value in said.items() if value is not None})
        starts = [0, *accumulate(rows)]
        data = tensor_bytes(items)
        row_bytes = len(data) // max(1, starts[-1])
        fingerprint = self._fingerprint.current(parts)
        namespace = self._namespace or Namespace(
            model=self._name,
            revision=fingerprint,
            dtype=str(items.dtype),
            processor=f"transformers {transformers.__version__}",
        )
        common = {
            "class": self._name,
            "weights": fingerprint,
            "settings": _settings(module, parts.values()),
            "arguments": described,
            "machine": _machine(items.device),
            "dtype": str(items.dtype),
            "row": list(items.shape[1:]),
        }

        def key(first: int, last: int) -> bytes:
            content = data[starts[first] * row_bytes : starts[last] * row_bytes]
            return namespace.key(_KIND, seam.modality, content, beside=beside[first:last], **common)

        count = len(rows)

        def whole() -> Any:
            return self._original(module, *args, **kwargs)

        if self._exact:
            exact = Batch(None, modules=self._modules)
            return _Call([key(0, count)], whole, lambda _: whole(), lambda _: exact, items.device)

        def encode(positions: Sequence[int]) -> Any:
            chosen = dict(given)
            chosen[seam.items] = torch.cat([items[starts[at] : starts[at + 1]] for at in positions])
            for name in (seam.grid, seam.beside):
                if name is not None and given.get(name) is not None:
                    chosen[name] = given[name][list(positions)]
            return self._original(module, **chosen)

        def batch(positions: Sequence[int]) -> Batch:
            return Batch([rows[at] for at in positions], listed=seam.listed, modules=self._modules)

        return _Call([key(at, at + 1) for at in range(count)], whole, encode, batch, items.device)

    def _arguments(self, module: Any, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
        """By name, those of **kwargs too; without the module, and without defaults."""
        given = dict(self._signature.bind(module, *args, **kwargs).arguments)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(name, {})
            elif parameter.kind is parameter.VAR_POSITIONAL and given.pop(name, ()):
                raise _Untouchable
        del given[next(iter(self._signature.parameters))]
        return given

    def _rows(self, given: Arguments, items: Any) -> tuple[list[int], list[Any]]:
        """How many rows each item has, and what else of it belongs to its key."""
        seam = self._seam
        if seam.grid is not None:
            beside: list[Any] = _plain(given.get(seam.grid)).tolist()
            rows = [t * h * w for t, h, w in beside]
        else:
            rows = [1] * items.shape[0]
            beside = [None] * len(rows)
            if given.get(seam.beside or "") is not None:
                more = _plain(given.get(seam.beside or ""))
                if more.shape[0] != len(rows):
                    raise _Untouchable
                beside = [[str(row.dtype), list(row.shape), hashlib.sha256(tensor_bytes(row)).digest()] for row in more]
        if not rows or min(rows) < 1 or sum(rows) != items.shape[0]:
            raise _Untouchable
        return rows, beside


def _firsts(keys: Sequence[bytes], parts: dict[bytes, Part]) -> dict[bytes, int]:
    """The first position of each key that has no part."""
    found: dict[bytes, int] = {}
    for at, key in enumerate(keys):
        if key not in parts:
            found.setdefault(key, at)
    return found


def _plain(tensor: Any) -> torch.Tensor:
    """The tensor, which is one with rows in plain memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.ndim == 0 or tensor.layout is not torch.strided:
        raise _Untouchable
    plain: torch.Tensor = tensor
    return plain


def _check_still(items: Any, parts: Iterable[Any]) -> None:
    """That encoding is a function of the input and the weights: no gradients wanted, no dropout, all on one device, and
    nobody else's code in it."""
    if any(_EVERYWHERE):
        raise _Untouchable
    gradients = torch.is_grad_enabled()
    if gradients and items.requires_grad:
        raise _Untouchable
    for part in parts:
        if any(each.training or not _is_known(each) for each in part.modules()):
            raise _Untouchable
        for tensor in tensors_of(part):
            if (gradients and tensor.requires_grad) or tensor.device != items.device:
                raise _Untouchable


def _is_known(module: Any) -> bool:
    """Whether what a module does follows from its class, and that is one of torch's or transformers'.

    An adapter can be switched off, and a hook changes what it likes, without a weight being changed.
    """
    inside = vars(module)
    kind = type(module)
    if "forward" in inside:
        # accelerate's hooks move tensors between devices, and change no value; they call what was there before.
        before = inside.get("_old_forward")
        if "_hf_hook" not in inside or getattr(before, "__func__", None) is not kind.forward:
            return False
    return (
        _is_theirs(kind)
        and _is_theirs_inside(kind.__dict__.get("_tensord_plain", kind).forward)
        and all(map(_is_theirs, inside["_forward_hooks"].values()))
        and all(map(_is_theirs, inside["_forward_pre_hooks"].values()))
    )


def _is_theirs(code: Any) -> bool:
    # transformers has hooks of its own, for outputs that are asked for by name.
    return str(getattr(code, "__module__", "")).startswith(("torch.", "transformers."))


@lru_cache(4096)
def _is_theirs_inside(method: Any) -> bool:
    """Whether a function, and each that it wraps, was written in one of their files: a patch often takes the module's
    name over from what it replaces.
    """
    while method is not None:
        if not str(getattr(method, "__globals__", {}).get("__name__", "")).startswith(("torch.", "transformers.")):
            return False
        method = getattr(method, "__wrapped__", None)
    return True


def _described(value: Any) -> Any:
    """A value as a key can hold it, type and all: True is not 1."""
    if value is None or type(value) in (bool, int, float, str):
        return [type(value).__name__, value]
    if type(value) in (list, tuple):
        return ["list", [_described(each) for each in value]]
    if type(value) is dict and all(type(name) is str for name in value):
        return ["dict", [[name, _described(value[name])] for name in sorted(value)]]
    raise _Untouchable


def _settings(module: Any, parts: Iterable[Any]) -> list[str]:
    """The configurations that the output follows, also those that are changed on a living model."""
    found = []
    for each in (module, *parts):
        config = getattr(each, "config", None)
        if config is not None:
            said = {name: value for name, value in config.to_dict().items() if name not in _UNSAID}
            found += [json.dumps(said, sort_keys=True, default=str), str(getattr(config, "_attn_implementation", None))]
    return found


def _machine(device: torch.device) -> list[Any]:
    """What else changes the bits of a result from one process of a host to another."""
    kind = device.type
    said: list[Any] = [
        torch.__version__,
        transformers.__version__,
        kind,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None,
    ]
    if kind == "cpu":
        backends = torch.backends
        said += [torch.get_num_threads(), backends.cpu.get_cpu_capability(), backends.mkldnn.enabled]
    elif kind == "cuda":
        cuda: Any = torch.backends.cuda
        said += [
            torch.cuda.get_device_name(device),
            cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
            [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()],
        ]
    return said
