"""Registers host memory with NVIDIA's driver: page-locked, so that the GPU copies from it without a buffer.

Owns: the calls of the driver. Does not own: which memory is registered, and for how long.

Calls the driver instead of the CUDA runtime: a failed call of the runtime leaves an error that the next call of torch
raises as its own.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

READ_ONLY: Final = 8
"""CU_MEMHOSTREGISTER_READ_ONLY: without it the driver refuses memory that is mapped read-only. Cards whose attribute
READ_ONLY_HOST_REGISTER_SUPPORTED is 0 refuse it with NOT_SUPPORTED (801)."""


class HostRegistration:
    """The driver's calls. The calling thread has a current context of the card.

    Args:
        driver: a replacement for libcuda.so.1.

    Raises:
        OSError: there is no driver.
    """

    def __init__(self, driver: Any = None) -> None:
        if driver is None:
            driver = ctypes.CDLL("libcuda.so.1")
            driver.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
            driver.cuMemHostUnregister.argtypes = [ctypes.c_void_p]
        self._driver = driver

    def register(self, address: int, size_bytes: int) -> str:
        """Registers memory that is mapped read-only. The driver takes less than 64 GiB in one call.

        Returns:
            "" if it is registered; otherwise the driver's refusal.
        """
        status = self._driver.cuMemHostRegister_v2(address, size_bytes, READ_ONLY)
        return f"cuMemHostRegister gave {status} ({self._name(status)})" if status else ""

    def unregister(self, address: int) -> str:
        """Ends a registration by the address where it begins. Returns "" or the driver's refusal."""
        status = self._driver.cuMemHostUnregister(address)
        return f"cuMemHostUnregister gave {status} ({self._name(status)})" if status else ""

    def _name(self, status: int) -> str:
        name = ctypes.c_char_p()
        self._driver.cuGetErrorName(status, ctypes.byref(name))
        return (name.value or b"unknown").decode()
