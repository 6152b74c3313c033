"""One call of a wrapped encoder: computes the items' keys, reads stored outputs, and has missing outputs encoded.

Owns: a call's items and their keys, and the sequence of lookup, claim, encoding, store and waiting. Does not own:
splitting an output (outputs), names of weights and settings (identity), the decision to bypass the cache (conditions).

Invariants: no claim outlives its call. A call encodes its own items before it waits for others, so two calls that want
the same items in any order never wait for each other in a circle. Only exceptions of the model are raised.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch
import transformers

from ...errors import TensordError
from ..arguments.namespace import Namespace
from ..computing.claim import Claim
from ..core.client import Client
from ..identity.described import described
from ..identity.modules import Fingerprint, tensor_bytes
from ..identity.settings import is_from
from ..writing.outcomes import Put, wait_for_all
from .conditions import NotShared, Reasons, attention_of, plain_tensor, state_of
from .outputs import CallItems, NotSplittable
from .patch_points import PatchPoint

Arguments = dict[str, Any]
Part = Any
"""An item's part of an output, as returned by `CallItems.split`."""

_ANSWER_S: Final = 0.1
"""Seconds to wait for the daemon to grant claims. An answer takes one round trip; only a hanging daemon takes so
long."""
_PUT_S: Final = 1.0
"""Seconds to wait for room, for all items of a call. Items without room are not stored."""
_STORED_S: Final = 0.1
"""Seconds to wait for the result of a call's puts. The daemon answers as soon as it has copied them."""
_PAUSE_S_MIN: Final = 0.0001
_PAUSE_S_MAX: Final = 0.005


@dataclass(slots=True)
class EncoderTally:
    """Counts of items: found; waited for while another process encoded them; encoded here. `passed` counts calls that
    bypassed the cache."""

    found: int = 0
    waited: int = 0
    encoded: int = 0
    passed: int = 0


@dataclass(frozen=True, slots=True)
class _Call:
    """One call's items, in order. The functions take positions of items."""

    keys: list[bytes]
    encode: Callable[[Sequence[int]], Any]
    """Returns the output for some items; for all of them as the model returns it."""
    batch: Callable[[Sequence[int]], CallItems]
    device: Any


class Encoder:
    """The wrapper of one module. Keeps no reference to the module.

    `plain` is the module's own class. The other arguments are those of `cached`.
    """

    def __init__(self, plain: type, point: PatchPoint, cache: Client, namespace: Namespace | None) -> None:
        self.tally = EncoderTally()
        self._reasons = Reasons()
        self._point = point
        self._cache = cache
        self._namespace = namespace
        self._name = f"{plain.__module__}.{plain.__qualname__}"
        self._plain = plain
        self._signature = inspect.signature(self._original)
        self._modules = ("transformers.modeling_outputs", *(base.__module__ for base in plain.__mro__))
        self._fingerprint = Fingerprint()

    @property
    def _original(self) -> Any:
        """The class's present method, since other code may patch it without knowing this wrapper."""
        return getattr(self._plain, self._point.method)

    def check(self, module: Any) -> None:
        """Logs why no call can be shared, if the installed transformers lacks what sharing needs for this module."""
        try:
            self._check_method()
            attention_of([module, *(each for part in self._parts(module).values() for each in part.modules())])
        except Exception as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        self._reasons.tell(error, f"outputs of {self._plain.__name__} are not shared")

    def _check_method(self) -> None:
        where = f"{self._plain.__name__}.{self._point.method} of transformers {transformers.__version__}"
        for name in (self._point.items, self._point.grid):
            if name is not None and name not in self._signature.parameters:
                raise NotShared(f"{where} has no parameter {name}, which sharing needs")
        if not is_from(self._original):
            raise NotShared(f"{where} was replaced by other code")

    def _parts(self, module: Any) -> dict[str, Any]:
        return {name: getattr(module, name) for name in self._point.parts} or {"": module}

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        try:
            call = self._prepared(module, args, kwargs)
        except Exception as error:
            # The model reports wrong arguments itself. A fault of this module is not the caller's, so the model just
            # computes.
            self.tally.passed += 1
            self._tell(error)
            return self._original(module, *args, **kwargs)
        everything = range(len(call.keys))
        try:
            parts = self._found(call.keys)
            self.tally.found += sum(key in parts for key in call.keys)
            missing = {key: call.keys.index(key) for key in call.keys if key not in parts}
            output = self._completed(call, parts, missing) if missing else None
            if output is None:
                output = call.batch(everything).join([parts[key] for key in call.keys], call.device)
            return output
        except TensordError:
            # The output cannot be split, or a stored entry is not an output of this model.
            self.tally.passed += 1
            return call.encode(everything)

    # ---- look up, claim, encode, wait

    def _completed(self, call: _Call, parts: dict[bytes, Part], missing: dict[bytes, int]) -> Any:
        """Adds the missing parts, given with their positions: encoded here, or by another process that claimed them
        first. The whole output if all of it was encoded here; None if it has to be joined from the parts."""
        claims = {key: self._cache.claim(key) for key in missing}
        try:
            _wait(claims, ("asked",), _ANSWER_S)
            ours = [at for key, at in missing.items() if claims[key].state not in ("waiting", "hit")]
            if len(ours) == len(missing) and not parts:
                # One call of the model with all items, duplicates included, so the output equals the unwrapped model's
                # bit for bit.
                return self._encoded(call, range(len(call.keys)), parts, claims)
            self._encoded(call, ours, parts, claims)
            _wait(claims, ("asked", "waiting"), self._cache.timeout_s)
            waited = self._found(claims.keys() - parts.keys())
            self.tally.waited += len(waited)
            parts.update(waited)
            left = [at for key, at in missing.items() if key not in parts]
            output = self._encoded(call, left, parts, claims)
            return output if len(left) == len(call.keys) else None
        finally:
            for claim in claims.values():
                claim.abandon()

    def _encoded(
        self, call: _Call, positions: Sequence[int], parts: dict[bytes, Part], claims: dict[bytes, Claim]
    ) -> Any:
        """The output for some items. Stores and adds their parts, and ends their claims."""
        if not positions:
            return None
        output = call.encode(positions)
        try:
            split = call.batch(positions).split(output)
        except NotSplittable:
            if len(positions) < len(call.keys):
                raise
            self.tally.passed += 1
            return output
        self.tally.encoded += len(positions)
        encoded = {call.keys[at]: part for at, part in zip(positions, split, strict=True)}
        parts.update(encoded)
        puts: list[Put] = []
        with suppress(TensordError):
            puts = self._cache.put_many(encoded.items(), timeout_s=_PUT_S)
            # A put ends the claim of its key only if it succeeds. After a failure the claim is abandoned, to tell
            # waiting clients.
            wait_for_all(puts, time.monotonic() + _STORED_S, _STORED_S)
        errors = {put.key: put.error for put in puts}
        for key in encoded:
            claims[key].end(stored=self._cache.contains(key), error=errors.get(key))
        return output

    def _found(self, keys: Iterable[bytes]) -> dict[bytes, Part]:
        """The stored parts of these keys, as tensors over the ring's memory, which they keep pinned."""
        found = {}
        for key in keys:
            with suppress(TensordError):
                if (lease := self._cache.get(key)) is not None:
                    found[key] = lease.torch(copy=False)
        return found

    # ---- the items of a call

    def _prepared(self, module: Any, args: tuple[Any, ...], kwargs: Arguments) -> _Call:
        """The call's items. Raises NotShared or a TensordError if the call has to bypass the cache."""
        self._check_method()
        point = self._point
        given = self._arguments(module, args, kwargs)
        items = plain_tensor(given.get(point.items))
        if given.get("return_dict") is False or getattr(module.config, "return_dict", True) is False:
            raise NotShared("a plain tuple does not say which of its elements are lists of items")
        state = state_of(self._parts(module), items, self._fingerprint, [module])
        rows, beside = point.rows_of(given, items)
        starts = [0, *accumulate(rows)]
        data = tensor_bytes(items)
        row_bytes = len(data) // max(1, starts[-1])
        namespace = self._namespace or Namespace(
            model=self._name,
            revision=state[-1],
            dtype=str(items.dtype),
            processor=f"transformers {transformers.__version__}",
        )
        # Each key contains the weights' fingerprint, so a key of any generation cannot stand for other weights.
        namespace = self._cache.current(namespace)
        by_item = [name for name in (point.items, point.grid, point.beside) if name and given.get(name) is not None]
        said = {
            name: value for name, value in given.items() if name not in (*by_item, "return_dict") and value is not None
        }
        common = {
            "class": self._name,
            "state": state,
            "arguments": described(said),
            "dtype": str(items.dtype),
            "row": list(items.shape[1:]),
        }

        def key(at: int) -> bytes:
            content = data[starts[at] * row_bytes : starts[at + 1] * row_bytes]
            return namespace.key("transformers", point.modality, content, beside=beside[at], **common)

        def encode(positions: Sequence[int]) -> Any:
            if len(positions) == len(rows):
                return self._original(module, *args, **kwargs)
            chosen = {name: given[name][list(positions)] for name in by_item if name != point.items}
            chosen[point.items] = torch.cat([items[starts[at] : starts[at + 1]] for at in positions])
            return self._original(module, **{**given, **chosen})

        def batch(positions: Sequence[int]) -> CallItems:
            return CallItems([rows[at] for at in positions], listed=point.listed, modules=self._modules)

        return _Call([key(at) for at in range(len(rows))], encode, batch, items.device)

    def _arguments(self, module: Any, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
        """The arguments by name, those of **kwargs included, without the module and without defaults."""
        given = dict(self._signature.bind(module, *args, **kwargs).arguments)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(name, {})
            elif parameter.kind is parameter.VAR_POSITIONAL and given.pop(name, ()):
                raise NotShared(f"arguments of *{name} have no names")
        del given[next(iter(self._signature.parameters))]
        return given


def _wait(claims: dict[bytes, Claim], states: Sequence[str], timeout_s: float) -> None:
    """Waits until no claim is in one of these states, for at most `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    pause_s = _PAUSE_S_MIN
    while any(claim.state in states for claim in claims.values()) and time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S_MAX)
