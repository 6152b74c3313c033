"""OpenTelemetry spans of the calls of clients and prefix caches.

    tensord.get_or_compute ─┬─ tensord.wait     for the daemon's answer to the claim, or for another client's payload
                            ├─ tensord.compute  the caller's function
                            └─ tensord.put
    tensord.put, tensord.put_many, tensord.match

Invariant: without the OpenTelemetry SDK `traced` returns the function itself, and `span` does nothing; the same as long
as the application has set no tracer provider, since a span that goes nowhere takes longer than a put. `get` has no
span: a hit takes less time than a span.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.util import find_spec
from typing import Any, Final, TypeVar

from tensord import __version__

from ...errors import BadKey
from ..arguments.checks import check_key

Call = TypeVar("Call", bound=Callable[..., Any])
Attributes = Mapping[str, str | int]
Describe = Callable[[Any], Attributes]
"""Returns a span's attributes, from the first argument of a call or from its result."""


try:
    # OpenTelemetry itself is not imported: it takes a tenth of tensord's own import.
    _INSTALLED = find_spec("opentelemetry.sdk") is not None
except ImportError:
    _INSTALLED = False
_PROVIDER: Final = "_TRACER_PROVIDER"
"""Where OpenTelemetry keeps the provider that the application has set."""
_tracer: Any = None
"""OpenTelemetry's tracer, from the first span on. A provider that was set stays."""


def _start(name: str, key: bytes | None = None) -> AbstractContextManager[Any] | None:
    """A new span. None while the application has set no provider, as far as this release of OpenTelemetry tells."""
    global _tracer
    if _tracer is None:
        # The application cannot have set a provider without this import.
        names = getattr(sys.modules.get("opentelemetry.trace"), "__dict__", {})
        if "get_tracer" not in names or names.get(_PROVIDER, names) is None:
            return None
        _tracer = names["get_tracer"]("tensord", __version__)
    started: AbstractContextManager[Any] = _tracer.start_as_current_span(
        name, attributes=None if key is None else {"tensord.key": key.hex()}
    )
    return started


def span(name: str, key: bytes | None = None) -> AbstractContextManager[Any]:
    """A span around a block, of a call for `key`."""
    return _start(name, key) or nullcontext()


def traced(
    name: str, first: str = "", given: Describe | None = None, result: Describe | None = None
) -> Callable[[Call], Call]:
    """A decorator for methods: each call is a span, with the call's exception. `first`: the name of the first argument,
    from which `given` makes attributes, whatever its type; `result` makes those of the result."""

    def decorated(call: Call) -> Call:
        if not _INSTALLED:
            return call

        @functools.wraps(call)
        def spanned(self: Any, *args: Any, **options: Any) -> Any:
            started = _start(name)
            if started is None:
                return call(self, *args, **options)
            with started as current:
                _tell(current, given, args[0] if args else options.get(first))
                done = call(self, *args, **options)
                _tell(current, result, done)
                return done

        return spanned  # type: ignore[return-value]

    return decorated


def _tell(current: Any, describe: Describe | None, value: Any) -> None:
    if describe is not None and current.is_recording():
        current.set_attributes(describe(value))


def key_of(key: object) -> Attributes:
    """The key of a call, if it is one."""
    with suppress(BadKey):
        return {"tensord.key": check_key(key).hex()}
    return {}


def state_of(put: Any) -> Attributes:
    """The state of a put."""
    return {"tensord.put.state": put.state}


def length_of(tokens: object) -> Attributes:
    """The number of tokens of a sequence."""
    try:
        return {"tensord.tokens": len(tokens)}  # type: ignore[arg-type]
    except TypeError:
        return {}
