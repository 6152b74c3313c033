"""A call of a wrapped encoder: what its items' keys are, which are found, which are encoded, and by whom.

Owns: a call's items and their keys, and the order of look-up, claim, encoding, store and waiting. Does not own the
pieces of an output (outputs), what names weights and settings (identity), nor when a call is left alone (conditions).

Invariants: no claim outlives its call. While others encode something, what is ours to encode is encoded first; so two
calls that want the same items in any order wait for each other only forwards. Nothing is raised but what the model
raises.
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch
import transformers

from ...errors import LimitReached, TensordError, TimedOut
from ..core.cache import Client
from ..core.claim import Claim
from ..core.lease import Lease
from ..core.namespace import Namespace
from ..core.puts import Put
from ..identity.modules import Fingerprint, tensor_bytes
from ..identity.origin import is_from
from ..identity.settings import configs_of, described, machine, settings
from .conditions import Untouchable, check_still, plain_tensor
from .functions import functions_called
from .outputs import CallItems, NotSplittable
from .patch_points import PatchPoint

__all__ = ["Encoder", "EncoderTally"]

Arguments = dict[str, Any]
Part = Any
"""An item's share of an output, as `CallItems.split` gives it."""

_KIND: Final = "transformers"
_ANSWER_S: Final = 0.1
"""How long the daemon may take to say who encodes. It takes a round trip; only where it hangs, this is waited."""
_PUT_S: Final = 1.0
"""How long room in the inbox may take for all items of a call; without it they are not stored."""
_STORED_S: Final = 0.1
"""How long the daemon may take to say what became of a call's puts. It is told as soon as they are copied."""
_PAUSE_S_MIN: Final = 0.0001
_PAUSE_S_MAX: Final = 0.005


@dataclass(slots=True)
class EncoderTally:
    """What became of items: found, waited for while another process encoded them, and encoded here; and how many calls
    went through untouched."""

    found: int = 0
    waited: int = 0
    encoded: int = 0
    passed: int = 0

    def add(self, other: EncoderTally) -> None:
        """Sums another one up into this."""
        self.found += other.found
        self.waited += other.waited
        self.encoded += other.encoded
        self.passed += other.passed


@dataclass(frozen=True, slots=True)
class _Call:
    """One call's items, in their order. Where something is asked for some of them, it is by their positions."""

    keys: list[bytes]
    whole: Callable[[], Any]
    """The output of all, as the model gives it."""
    encode: Callable[[Sequence[int]], Any]
    """The output of some."""
    batch: Callable[[Sequence[int]], CallItems]
    device: Any


class Encoder:
    """How one module is wrapped: from a call's arguments to its output. Keeps no reference to the module.

    `plain` is the module's own class. The other arguments are those of `cached`.
    """

    def __init__(
        self, plain: type, point: PatchPoint, cache: Client, namespace: Namespace | None, *, exact: bool
    ) -> None:
        self.tally = EncoderTally()
        self._seam = point
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

    def modules(self, module: Any) -> list[Any]:
        """The module, and those whose code encodes."""
        return [module, *(each for part in self._parts(module).values() for each in part.modules())]

    def functions(self, modules: Collection[Any]) -> list[str]:
        """What the encoder's code calls by the names in its configurations.

        Raises:
            Replaced: some of what it calls is not the libraries' own, or was replaced since it was first looked at.
        """
        names = {getattr(config, "_attn_implementation", None) for config in configs_of(modules)}
        return functions_called({self._plain, *map(type, modules)}, names)

    def _parts(self, module: Any) -> dict[str, Any]:
        return {name: getattr(module, name) for name in self._seam.parts} or {"": module}

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
            Untouchable: it has to go through as it is.
        """
        point = self._seam
        given = self._arguments(module, args, kwargs)
        items = plain_tensor(given.get(point.items))
        parts = self._parts(module)
        modules = self.modules(module)
        if not is_from(self._original):
            raise Untouchable
        check_still(items, parts.values())
        if given.get("return_dict") is False or getattr(module.config, "return_dict", True) is False:
            # A bare tuple does not say what its lists are.
            raise Untouchable
        rows, beside = self._rows(given, items)
        said = {name: value for name, value in given.items() if name not in (point.items, point.grid, point.beside)}
        said.pop("return_dict", None)
        said = {name: value for name, value in said.items() if value is not None}
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
        # Each key names the weights by their content, so that none of a generation can be of other weights.
        namespace = self._cache.current(namespace)
        common = {
            "class": self._name,
            "weights": fingerprint,
            "settings": settings(modules),
            "functions": self.functions(modules),
            "arguments": described(said),
            "machine": machine(items.device),
            "dtype": str(items.dtype),
            "row": list(items.shape[1:]),
        }

        def key(first: int, last: int) -> bytes:
            content = data[starts[first] * row_bytes : starts[last] * row_bytes]
            return namespace.key(_KIND, point.modality, content, beside=beside[first:last], **common)

        count = len(rows)

        def whole() -> Any:
            return self._original(module, *args, **kwargs)

        if self._exact:
            exact = CallItems(None, modules=self._modules)
            return _Call([key(0, count)], whole, lambda _: whole(), lambda _: exact, items.device)

        def encode(positions: Sequence[int]) -> Any:
            chosen = dict(given)
            chosen[point.items] = torch.cat([items[starts[at] : starts[at + 1]] for at in positions])
            for name in (point.grid, point.beside):
                if name is not None and given.get(name) is not None:
                    chosen[name] = given[name][list(positions)]
            return self._original(module, **chosen)

        def batch(positions: Sequence[int]) -> CallItems:
            return CallItems([rows[at] for at in positions], listed=point.listed, modules=self._modules)

        return _Call([key(at, at + 1) for at in range(count)], whole, encode, batch, items.device)

    def _arguments(self, module: Any, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
        """By name, those of **kwargs too; without the module, and without defaults."""
        given = dict(self._signature.bind(module, *args, **kwargs).arguments)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(name, {})
            elif parameter.kind is parameter.VAR_POSITIONAL and given.pop(name, ()):
                raise Untouchable
        del given[next(iter(self._signature.parameters))]
        return given

    def _rows(self, given: Arguments, items: Any) -> tuple[list[int], list[Any]]:
        """How many rows each item has, and what else of it belongs to its key."""
        point = self._seam
        if point.grid is not None:
            beside: list[Any] = plain_tensor(given.get(point.grid)).tolist()
            rows = [t * h * w for t, h, w in beside]
        else:
            rows = [1] * items.shape[0]
            beside = [None] * len(rows)
            if given.get(point.beside or "") is not None:
                more = plain_tensor(given.get(point.beside or ""))
                if more.shape[0] != len(rows):
                    raise Untouchable
                beside = [[str(row.dtype), list(row.shape), hashlib.sha256(tensor_bytes(row)).digest()] for row in more]
        if not rows or min(rows) < 1 or sum(rows) != items.shape[0]:
            raise Untouchable
        return rows, beside


def _firsts(keys: Sequence[bytes], parts: dict[bytes, Part]) -> dict[bytes, int]:
    """The first position of each key that has no part."""
    found: dict[bytes, int] = {}
    for at, key in enumerate(keys):
        if key not in parts:
            found.setdefault(key, at)
    return found
