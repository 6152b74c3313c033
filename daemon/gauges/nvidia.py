"""A source for NVIDIA GPUs, through nvidia-ml-py.

Owns: the calls of NVML. Does not own when the library is opened and closed (`library`).

NVML needs and creates no GPU context. Used bytes are those that NVML reports; they include the driver's reserve.
"""

from __future__ import annotations

from typing import Any, Final

from ...ipc.modes import Tier
from .library import LibrarySource
from .offers import offer
from .reading import GaugeAbsent, Reading, pci_name


class Nvml:
    """NVML as a Library. Its state is global to the process; NVML counts how often it was opened."""

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
        """As in Library. NVML writes the PCI domain with eight digits; the kernel and torch use four."""
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
    """The source for NVIDIA GPUs. Opens nothing yet."""
    return LibrarySource(Nvml())


offer("nvidia", Tier.DEVICE, lambda given: nvidia_source(), auto=2, says="nvidia-ml-py")
