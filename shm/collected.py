"""Frees memory and descriptors once an object is collected, without Python code.

An object may be collected between any two instructions of any thread. Python code that runs then, in a finalizer or in
`__del__`, may be ended by a signal handler's exception, and what it was to free stays for ever.

Owns: the descriptors that end with an object. Does not own the objects.
Invariant: between the collection of an object and the end of its last callback the interpreter runs C functions only.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any, Final
from weakref import ref

libc_close = ctypes.CDLL(None, use_errno=True).close
libc_close.argtypes = [ctypes.c_int]


class Collected(ref[Any]):
    """A weak reference whose callback is a C function with all of its arguments bound. Keep it until the callback runs.

    The interpreter passes the reference itself as the last argument. Functions of libc ignore it; `dict.pop` takes it
    as the default. Of several references to one object, the last one made is called first.
    """

    __slots__ = ()
    _as_parameter_: Final = 0
    """What ctypes passes for the reference."""


_closing: dict[int, tuple[Collected, ...]] = {}
"""By descriptor."""


def close_with(holder: object, fd: int) -> None:
    """Closes `fd` once `holder` is collected. Nothing else may close it."""
    close = Collected(holder, partial(libc_close, fd))
    # SYNC POINT: forgotten before it is closed. Another thread may open a file of this number at once.
    forget = Collected(holder, partial(_closing.pop, fd))
    _closing[fd] = forget, close
