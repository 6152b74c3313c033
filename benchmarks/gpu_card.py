"""An NVIDIA card for gpu_check.py: its memory as NVML reports it, memory registered with its driver, and the report.

Owns: no check and no figure.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

GIB: Final = 1 << 30
REGISTER_READ_ONLY: Final = 8
# One registration has to stay under 64 GiB.
CHUNK_BYTES: Final = 32 * GIB


class NoCard(Exception):
    """There is nothing to check here; the message says what is missing."""


@dataclass
class Report:
    """Checks, each with what was seen (`held` None: it cannot be told here), and figures."""

    card: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, float | None] = field(default_factory=dict)

    def check(self, name: str, held: bool | None, seen: str) -> None:
        """Notes one, and says it."""
        self.checks.append({"check": name, "held": held, "seen": seen})
        verdict = "cannot tell" if held is None else "held" if held else "FAILED"
        print(f"{verdict:>12}  {name}: {seen}", flush=True)

    def figure(self, name: str, bytes_per_s: float | None) -> None:
        """Notes one, in GB/s, and says it."""
        self.figures[name] = None if bytes_per_s is None else bytes_per_s / 1e9
        told = "not measured" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f} GB/s"
        print(f"{'':>12}  {name}: {told}", flush=True)

    @property
    def failed(self) -> bool:
        return any(check["held"] is False for check in self.checks)


class Nvml:
    """The card as NVML shows it."""

    def __init__(self, name: str) -> None:
        import pynvml

        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(name.encode())
        except pynvml.NVMLError as error:
            raise NoCard(f"NVML does not know the card {name}: {error}") from None

    def used_bytes(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def about(self) -> dict[str, Any]:
        return {
            "name": self._nvml.nvmlDeviceGetName(self._handle),
            "driver": self._nvml.nvmlSystemGetDriverVersion(),
            "total_bytes": int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).total),
        }

    def pids(self) -> set[int]:
        """Processes with a context on the card, as the driver numbers them: in a container those may be the host's."""
        return {process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}

    def settled(self, condition: Callable[[int], bool]) -> int:
        """Reads until `condition(used_bytes)` is true or patience ends. Returns the last reading."""
        deadline = time.monotonic() + 10
        while not condition(used_bytes := self.used_bytes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return used_bytes


@contextmanager
def registered(address: int, length_bytes: int) -> Iterator[str]:
    """Within the block the driver knows this read-only mapping. Gives why not, or "".

    The driver's own call, as a failure of the runtime's would stick, and torch would blame it on something else.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    driver.cuMemHostUnregister.argtypes = [ctypes.c_void_p]
    done: list[int] = []
    why = ""
    try:
        for at in range(address, address + length_bytes, CHUNK_BYTES):
            size_bytes = min(CHUNK_BYTES, address + length_bytes - at)
            status = driver.cuMemHostRegister_v2(at, size_bytes, REGISTER_READ_ONLY)
            if status != 0:
                why = f"cuMemHostRegister gave {status} ({_error_name(driver, status)})"
                break
            done.append(at)
        yield why
    finally:
        # Before the process ends, and before the mapping does.
        for at in done:
            driver.cuMemHostUnregister(at)


def _error_name(driver: ctypes.CDLL, status: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(status, ctypes.byref(name))
    return (name.value or b"unknown").decode()
