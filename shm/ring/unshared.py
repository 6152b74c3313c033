"""Writable shared memory that a forked child does not share, and descriptors that end with an object.

An object may be collected between any two instructions of any thread. Python code that runs then, in a finalizer or in
`__del__`, may be ended by a signal handler's exception, and what it was to free stays for ever. So memory and
descriptors end with an object by C functions only: those of `mmap`, and `close_with`.

In a child, private memory takes the place of each mapping, at the same address. So a copy that the fork has met in the
forking thread goes on there, and reaches nobody. Nothing else in a child looks at the memory.
"""

from __future__ import annotations

import ctypes
import os
from functools import partial
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

from .segments import address_of

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000

_libc = ctypes.CDLL(None)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.close.argtypes = [ctypes.c_int]


class _Collected(ref[Any]):
    """A weak reference whose callback is a C function with all of its arguments bound. Keep it until the callback runs.
    The interpreter passes the reference itself as the last argument. Functions of libc ignore it; `dict.pop` takes it
    as the default. Of several references to one object, the last one made is called first."""

    __slots__ = ()
    _as_parameter_: Final = 0
    """What ctypes passes for the reference."""


_closing: dict[int, tuple[_Collected, ...]] = {}
"""By descriptor."""


def close_with(holder: object, fd: int) -> None:
    """Closes `fd` once `holder` is collected. Nothing else may close it."""
    close = _Collected(holder, partial(_libc.close, fd))
    # SYNC POINT: forgotten before it is closed. Another thread may open a file of this number at once.
    forget = _Collected(holder, partial(_closing.pop, fd))
    _closing[fd] = forget, close


_processes: WeakKeyDictionary[mmap, int] = WeakKeyDictionary()
"""By mapping: the process that made it, or has put private memory in its place."""


def unshared(fd: int, size_bytes: int) -> mmap:
    """The first `size_bytes` of the file behind `fd`, mapped for writing in this process alone. The caller keeps `fd`.
    Raises OSError if the process has no free descriptor or no address space."""
    memory = mmap(fd, size_bytes)
    _processes[memory] = os.getpid()
    return memory


def after_fork_in_child() -> None:
    """Puts private memory in the place of all mappings that this process has not made itself. May be repeated. Without
    memory for it a mapping stays shared."""
    here = os.getpid()
    for memory, process in list(_processes.items()):
        if process != here:
            flags = MAP_PRIVATE | MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
            _libc.mmap(address_of(memory), len(memory), PROT_READ | PROT_WRITE, flags, -1, 0)
            _processes[memory] = here
