"""NVIDIA's GPUs, through nvidia-ml-py.

NVML needs no GPU context, and makes none. `used` is what NVML counts as used, the driver's own reserve among it.
"""

from __future__ import annotations

from typing import Any, Final

from ...ipc.modes import Tier
from .library import LibrarySource
from .offers import offer
from .reading import GaugeAbsent, Reading, pci_name


class Nvml:
    """NVML, as a Library. Its state belongs to the whole process; it counts who opened it."""

    name: Final = "nvidia"

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: dict[int, Any] = {}

    def open(self) -> None:
        """As in Library."""
        try:
            import pynvml
        except ImportError:
            raise GaugeAbsent("nvidia-ml-py is not installed: pip install 'tensord[nvidia]'") from None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            if error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
                raise GaugeAbsent(str(error)) from error
            raise
        self._nvml = pynvml

    def count(self) -> int:
        """As in Library."""
        return int(self._nvml.nvmlDeviceGetCount())

    def address(self, index: int) -> str:
        """As in Library. NVML writes a domain in eight digits; four are what everybody else writes."""
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        found = self._nvml.nvmlDeviceGetPciInfo(handle)
        self._handles[index] = handle
        return pci_name(found.domain, found.bus, found.device)

    def read(self, index: int) -> Reading:
        """As in Library."""
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handles[index])
        return Reading(int(memory.used), int(memory.total))

    def shut(self) -> None:
        """As in Library."""
        self._handles.clear()
        self._nvml.nvmlShutdown()


def nvidia_source() -> LibrarySource:
    """Opens nothing yet."""
    return LibrarySource(Nvml())


offer("nvidia", Tier.DEVICE, lambda given: nvidia_source(), auto=2, says="nvidia-ml-py")
