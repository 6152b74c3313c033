"""Writable shared memory that no fork inherits; a child of this interpreter has a private copy in its place.

Owns: where such a mapping lies, and what becomes of it in a child. Does not own the bytes.

The kernel leaves each mapping out of every child (MADV_DONTFORK). Arrays over it are inherited all the same, so the
child maps the same file at the same address privately: it reads the bytes of the file, and its writes reach nobody. The
mappings lie in a part of the address space in which the kernel places nothing by itself, so that in the child nothing
else lies there. `make_private` does the same to this process.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final
from weakref import finalize

_PROT_READ_WRITE: Final = 3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED_NOREPLACE = 1, 2, 0x100000
_MADV_DONTFORK: Final = 10
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED: Final = ctypes.c_void_p(-1).value
# SYNC POINT: user addresses of x86-64 end at 2**47, and the kernel goes downwards from there; those of ARM may end at
# 2**39.
_FIRST_PLACE, _LAST_PLACE = 1 << 44, 1 << 46
_PLACE_BYTES: Final = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_mapped: dict[int, tuple[int, int, int]] = {}
"""By address: bytes, a descriptor of the file, and the process that mapped it there; -1 where it is private already."""
_place = _FIRST_PLACE


class Unshared:
    """The first `size_bytes` of the file behind `fd`, mapped for writing. Lives as long as any array over `memory`.

    `memory` is to be given to `numpy.ndarray` as its buffer. `address` is where it begins.
    """

    __slots__ = ("address", "memory")

    def __init__(self, fd: int, size_bytes: int) -> None:
        """`fd` stays the caller's.

        Raises:
            OSError: the process has no descriptor, or no address space, for it.
        """
        own_fd = os.dup(fd)
        try:
            self.address = _map(_next_place(size_bytes), size_bytes, _MAP_SHARED, fd)
        except OSError:
            os.close(own_fd)
            raise
        _mapped[self.address] = size_bytes, own_fd, os.getpid()
        if _libc.madvise(self.address, size_bytes, _MADV_DONTFORK):
            error = _last_error()
            _unmap(self.address)
            raise error
        self.memory: Any = (ctypes.c_ubyte * size_bytes).from_address(self.address)
        # Not at the interpreter's end, when arrays may still be written.
        finalize(self.memory, _unmap, self.address).atexit = False

    def make_private(self) -> None:
        """Keeps what is written there from now on in this process, and in those that it forks. Arrays stay where they
        are, and as they are. To be called by one thread at a time; others may write meanwhile.

        Raises:
            OSError: there is no memory for it. It is shared as before.
        """
        address = self.address
        size_bytes, fd, process = _mapped[address]
        if fd < 0:
            return
        # Elsewhere first: where that fails, what is mapped here has not been touched.
        elsewhere = _map(None, size_bytes, _MAP_PRIVATE, fd)
        moved = _libc.mremap(elsewhere, size_bytes, size_bytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, address)
        if moved != address:
            error = _last_error()
            _libc.munmap(elsewhere, size_bytes)
            raise error
        # SYNC POINT: after it is mapped. A fork in between finds the place taken, and leaves the child what lies there.
        _mapped[address] = size_bytes, -1, process
        os.close(fd)


def after_fork_in_child() -> None:
    """Maps every such memory privately. Before anything may write to an inherited array, or drop the last of them.

    What was mapped in this process stays as it is.
    """
    here = os.getpid()
    for address, (size_bytes, fd, process) in list(_mapped.items()):
        if process == here or fd < 0:
            continue
        try:
            found = _map(address, size_bytes, _MAP_PRIVATE | _MAP_FIXED_NOREPLACE, fd)
        except OSError:
            found = None
        if found == address:
            _mapped[address] = size_bytes, fd, here
            continue
        # Something else lies there: it is not this module's to unmap.
        del _mapped[address]
        os.close(fd)
        if found is not None:
            _libc.munmap(found, size_bytes)


def _next_place(size_bytes: int) -> int:
    """Where nothing lies, as far as this module knows. No more than a wish: the kernel chooses another place if not."""
    global _place
    place = _place if _place < _LAST_PLACE else _FIRST_PLACE
    _place = place + (size_bytes // _PLACE_BYTES + 2) * _PLACE_BYTES
    return place


def _map(address: int | None, size_bytes: int, flags: int, fd: int) -> int:
    found: int | None = _libc.mmap(address, size_bytes, _PROT_READ_WRITE, flags, fd, 0)
    if found is None or found == _FAILED:
        raise _last_error()
    return found


def _unmap(address: int) -> None:
    size_bytes, fd, _ = _mapped.pop(address, (0, -1, 0))
    if size_bytes:
        _libc.munmap(address, size_bytes)
    if fd >= 0:
        os.close(fd)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
