"""OpenTelemetry spans of the calls of clients and prefix caches.

    tensord.get_or_compute ─┬─ tensord.wait     for the daemon's answer to the claim, or for another client's payload
                            ├─ tensord.compute  the caller's function
                            └─ tensord.put
    tensord.put, tensord.put_many, tensord.match

Owns: the tracer, and the names of spans' attributes. Does not own: the calls, nor the exporter, which the application
configures.

Invariant: without the OpenTelemetry SDK `traced` returns the function itself, and `span` does nothing. `get` has no
span: a hit takes less time than a span.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sized
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any, Final, TypeVar

from tensord import __version__

Call = TypeVar("Call", bound=Callable[..., Any])
Attributes = Mapping[str, str | int]
Describe = Callable[[Any, Any], Attributes]
"""Returns a span's attributes, from the first argument of a call and from its result."""


def _tracer() -> Any:
    """OpenTelemetry's tracer; None if its SDK is not installed."""
    try:
        if find_spec("opentelemetry.sdk") is None:
            return None
        from opentelemetry import trace
    except ImportError:
        return None
    return trace.get_tracer("tensord", __version__)


_TRACER: Final = _tracer()


def span(name: str) -> AbstractContextManager[Any]:
    """A span around a block."""
    return nullcontext() if _TRACER is None else _TRACER.start_as_current_span(name)


def traced(name: str, first: str, describe: Describe) -> Callable[[Call], Call]:
    """A decorator for methods and coroutine methods: each call is a span, with the attributes that `describe` returns.
    An exception of the call is recorded in its span. `first`: the name of the method's first argument."""

    def decorated(call: Call) -> Call:
        if _TRACER is None:
            return call
        start = _TRACER.start_as_current_span

        @functools.wraps(call)
        def spanned(self: Any, *args: Any, **options: Any) -> Any:
            with start(name) as current:
                result = call(self, *args, **options)
                if current.is_recording():
                    current.set_attributes(describe(args[0] if args else options[first], result))
                return result

        @functools.wraps(call)
        async def awaited(self: Any, *args: Any, **options: Any) -> Any:
            with start(name) as current:
                result = await call(self, *args, **options)
                if current.is_recording():
                    current.set_attributes(describe(args[0] if args else options[first], result))
                return result

        return awaited if inspect.iscoroutinefunction(call) else spanned  # type: ignore[return-value]

    return decorated


def key_of(key: bytes, result: object) -> Attributes:
    """The key of a call."""
    return {"tensord.key": bytes(key).hex()}


def put_of(key: bytes, put: Any) -> Attributes:
    """The key and the state of a put."""
    return {"tensord.key": bytes(key).hex(), "tensord.put.state": put.state}


def puts_of(items: object, puts: Sized) -> Attributes:
    """The number of puts."""
    return {"tensord.puts": len(puts)}


def match_of(tokens: Sized, match: Any) -> Attributes:
    """The numbers of tokens and of matched tokens of a sequence."""
    return {"tensord.tokens": len(tokens), "tensord.tokens.matched": 0 if match is None else match.offset}
