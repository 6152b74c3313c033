"""Writable shared memory that a forked child does not share. The child has a private copy at the same address instead.

An object may be collected between any two instructions of any thread. Python code that runs then, in a finalizer or in
`__del__`, may be ended by a signal handler's exception, and what it was to free stays for ever. So memory and
descriptors end with an object by C functions only (`Collected`).

The kernel leaves each mapping out of every child (MADV_DONTFORK), but arrays over the mapping are inherited. So the
child maps the same file privately at the same address: it reads the file's bytes, and no other process sees its writes.
The mappings lie in a range of addresses in which the kernel places nothing on its own, so that the child's range is
free.

Invariants: arrays over the memory stay valid at their addresses, in the parent and in every child. A mapping ends with
its last array. Between the collection of an object and the end of its last callback the interpreter runs C functions
only.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import partial
from typing import Any, Final, NamedTuple
from weakref import ref

_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED_NOREPLACE = 1, 2, 0x100000
_MADV_DONTFORK: Final = 10
_FAILED: Final = ctypes.c_void_p(-1).value
# SYNC POINT: user addresses of x86-64 end at 2**47, and the kernel allocates downwards from there. Those of ARM may end
# at 2**39.
_FIRST_PLACE, _LAST_PLACE = 1 << 44, 1 << 46
_PLACE_BYTES: Final = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc_close = _libc.close
libc_close.argtypes = [ctypes.c_int]


class Collected(ref[Any]):
    """A weak reference whose callback is a C function with all of its arguments bound. Keep it until the callback runs.
    The interpreter passes the reference itself as the last argument. Functions of libc ignore it; `dict.pop` takes it
    as the default. Of several references to one object, the last one made is called first."""

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


class _Mapping(NamedTuple):
    """`fd`: a descriptor of the file; -1 if the mapping is private. `process`: the pid of the process that mapped it.
    `ends`: what happens once the memory is collected. `close`: closes `fd` then."""

    size_bytes: int
    fd: int
    process: int
    ends: tuple[Collected, ...]
    close: Collected | None


_mapped: dict[int, _Mapping] = {}
"""By address."""
_place = _FIRST_PLACE


class Unshared:
    """The first `size_bytes` of the file behind `fd`, mapped for writing. Lives as long as any array over `memory`, a
    buffer for `numpy.ndarray`, which begins at `address`."""

    __slots__ = ("address", "memory")

    def __init__(self, fd: int, size_bytes: int) -> None:
        """The caller keeps `fd`. Raises OSError if the process has no free descriptor or no address space."""
        own_fd = os.dup(fd)
        try:
            self.address = _map(_next_place(size_bytes), size_bytes, _MAP_SHARED, fd)
        except OSError:
            os.close(own_fd)
            raise
        if _libc.madvise(self.address, size_bytes, _MADV_DONTFORK):
            error = _last_error()
            _libc.munmap(self.address, size_bytes)
            os.close(own_fd)
            raise error
        self.memory: Any = (ctypes.c_ubyte * size_bytes).from_address(self.address)
        _mapped[self.address] = _ending(self.memory, self.address, size_bytes, own_fd)


def after_fork_in_child() -> None:
    """Maps all such memory privately in a child, and closes the child's descriptors of it. Call it before inherited
    arrays can be written or collected. Mappings that this process made itself stay as they are."""
    here = os.getpid()
    # SYNC POINT: the collector may run at any moment. Memory that is held here ends after its mapping is replaced, and
    # memory that has ended is not in the table any more. A list of integers: nothing is collected while it is filled.
    held = [(address, _memory_at(address)) for address in list(_mapped)]
    for address, memory in held:
        if memory is not None:
            _replace_inherited(address, here)


def _memory_at(address: int) -> object | None:
    """The memory of a mapping; None once it is collected."""
    mapping = _mapped.get(address)
    return mapping.ends[0]() if mapping is not None else None


def _replace_inherited(address: int, here: int) -> None:
    """Maps the file of one mapping privately in the process `here`, if another process made the mapping."""
    size_bytes, fd, process = _mapped[address][:3]
    if process == here or fd < 0:
        return
    try:
        found = _map(address, size_bytes, _MAP_PRIVATE | _MAP_FIXED_NOREPLACE, fd)
    except OSError:
        found = None
    if found == address:
        # Children of this child inherit the private mapping, so nothing needs the file any more. No name here or in the
        # callers keeps the mapping's `close`, which would close `fd` again.
        _mapped[address] = _mapped[address]._replace(fd=-1, process=here, close=None)
        os.close(fd)
    else:
        # Another mapping has this address. This module must not unmap it.
        del _mapped[address]
        if found is not None:
            _libc.munmap(found, size_bytes)
        os.close(fd)


def _next_place(size_bytes: int) -> int:
    """The next address to try for a mapping. It is only a hint: if it is taken, the kernel chooses another."""
    global _place
    place = _place if _place < _LAST_PLACE else _FIRST_PLACE
    _place = place + (size_bytes // _PLACE_BYTES + 2) * _PLACE_BYTES
    return place


def _map(address: int | None, size_bytes: int, flags: int, fd: int) -> int:
    found: int | None = _libc.mmap(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if found is None or found == _FAILED:
        raise _last_error()
    return found


def _ending(memory: Any, address: int, size_bytes: int, fd: int) -> _Mapping:
    """A mapping whose account, range and descriptor end with `memory`."""
    # SYNC POINT: the interpreter calls the last callback first. The account goes before the range, because another
    # thread may map the same range at once.
    close = Collected(memory, partial(libc_close, fd))
    unmap = Collected(memory, partial(_libc.munmap, address, size_bytes))
    forget = Collected(memory, partial(_mapped.pop, address))
    return _Mapping(size_bytes, fd, os.getpid(), (unmap, forget), close)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
