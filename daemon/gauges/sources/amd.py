"""A source for AMD GPUs, through pyrsmi.

pyrsmi 1.1 is patched in five places, in this process only:
- it declares no argument types, so that ctypes truncates 64-bit handles to C ints and every reading is -1;
- it logs errors to the root logger, and configures it; here they become the text of the failure;
- it runs a shell to find the driver, which writes to standard error; here the same file is read;
- it redirects descriptor 2, and so the daemon's log, to /dev/null for a while; here libdrm's output is allowed;
- it fails if AMD's own Python package is installed and cannot be imported; here that package then counts as missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from ..reading import GaugeAbsent, GaugeFailed, Reading, pci_name
from .library import LibrarySource, Unit
from .sysfs import is_apu

_HANDLE: Final = ctypes.c_void_p
_ARGUMENTS: Final = {
    "amdsmi_get_processor_handles": [_HANDLE, ctypes.POINTER(ctypes.c_uint32), ctypes.c_void_p],
    "amdsmi_get_gpu_device_bdf": [_HANDLE, ctypes.c_void_p],
    "amdsmi_get_gpu_memory_usage": [_HANDLE, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64)],
    "amdsmi_get_gpu_memory_total": [_HANDLE, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64)],
}
_LINES_MAX: Final = 8


class AmdSource(LibrarySource):
    """The GPUs that pyrsmi lists. Its state is global to the process. `root`: the folder that has /sys."""

    name: Final = "amd"
    preference = 1

    def __init__(self, root: Path = Path("/")) -> None:
        super().__init__()
        self._driver = root / "sys/module/amdgpu"
        self._devices = root / "sys/bus/pci/devices"
        self._apus: dict[int, bool] = {}
        self._said: list[str] = []
        """What pyrsmi has logged during the last call."""
        self._rocml: Any = None

    def open(self) -> None:
        """As in LibrarySource. Without the driver, nothing is imported."""
        if not self._driver_is_live():
            raise GaugeAbsent(f"the amdgpu driver is not loaded ({self._driver})")
        try:
            from pyrsmi import rocml
        except ImportError:
            raise GaugeAbsent("pyrsmi is not installed: pip install 'tensord[amd]'") from None
        self._said.clear()
        rocml.logging = SimpleNamespace(**dict.fromkeys(("debug", "info", "warning", "error"), self._hear))
        rocml._driver_initialized = self._driver_is_live
        rocml._suppress_stderr = contextlib.nullcontext
        _hide_broken_package()
        _declare(rocml)
        try:
            rocml.smi_initialize()
        except rocml.ROCMLError_LibraryNotFound as error:
            raise GaugeAbsent(str(error)) from error
        self._rocml = rocml

    def units(self) -> range:
        """As in LibrarySource. The partitions of a card are listed as cards."""
        count = int(self._rocml.smi_get_device_count())
        if count < 0:
            raise GaugeFailed(f"pyrsmi counts {count} GPUs: {self._why}")
        return range(count)

    def address(self, unit: int) -> str:
        """As in LibrarySource. The function of a partition's address is its number on the card. Libraries put the
        number there, or give all partitions of a card one address; then they are counted here."""
        domain, bus, device, function = self._place(unit)
        before = sum(self._place(index) == self._place(unit) for index in range(unit))
        name = pci_name(domain, bus, device, function + before)
        self._apus[unit] = is_apu(self._devices / name)
        return name

    def _place(self, index: int) -> tuple[int, int, int, int]:
        """The parts of a PCI address. amdsmi and its Python package have the domain at different bits of the number."""
        self._said.clear()
        found = int(self._rocml.smi_get_device_pci_id(index))
        if found < 0:
            raise GaugeFailed(f"pyrsmi has no PCI address for GPU {index}: {self._why}")
        domain = found >> 32 if self._rocml._using_amdsmi_package else found >> 16
        return domain, found >> 8 & 0xFF, found >> 3 & 0x1F, found & 0x7

    def memory(self, unit: Unit) -> Reading:
        assert isinstance(unit, int)
        vram = self._memory(unit, "VRAM")
        if not self._apus[unit]:
            return vram
        gtt = self._memory(unit, "GTT")
        return gtt if vram.total_bytes < gtt.total_bytes else vram

    def _memory(self, index: int, kind: str) -> Reading:
        self._said.clear()
        used_bytes = int(self._rocml.smi_get_device_memory_used(index, kind))
        total_bytes = int(self._rocml.smi_get_device_memory_total(index, kind))
        if used_bytes < 0 or total_bytes < 0:
            raise GaugeFailed(f"pyrsmi answers {used_bytes} of {total_bytes} bytes used: {self._why}")
        return Reading(used_bytes, total_bytes, {} if kind == "VRAM" else {"of": kind})

    def shut(self) -> None:
        self._rocml.smi_shutdown()

    def _hear(self, line: object, *_: object) -> None:
        if len(self._said) < _LINES_MAX:
            self._said.append(" ".join(str(line).split()))

    @property
    def _why(self) -> str:
        return "; ".join(self._said) or "pyrsmi gives no reason"

    def _driver_is_live(self) -> bool:
        try:
            return (self._driver / "initstate").read_text().strip() == "live"
        except OSError:
            return self._driver.is_dir()  # a driver that is built into the kernel has no such file


def _hide_broken_package() -> None:
    """Makes `import amdsmi` raise ImportError if it raises any other error, as it does when its library is missing."""
    try:
        import amdsmi  # noqa: F401
    except Exception:
        sys.modules["amdsmi"] = None  # type: ignore[assignment]  # with None, `import` raises ImportError


def _declare(rocml: Any) -> None:
    """Declares the argument types of the library's functions for ctypes."""
    try:
        rocml._load_rocm_library()
    except rocml.ROCMLError_LibraryNotFound:
        return  # AMD's own Python package may bring a library, and declares the types itself
    for function, arguments in _ARGUMENTS.items():
        with contextlib.suppress(AttributeError):
            getattr(rocml.rocm_lib, function).argtypes = arguments
