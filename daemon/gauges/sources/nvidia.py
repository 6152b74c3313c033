"""A source for NVIDIA GPUs, through nvidia-ml-py.

NVML needs and creates no GPU context. Used bytes are those that NVML reports; they include the driver's reserve.

In place of a GPU in MIG mode its slices are listed, each by its UUID ("MIG-..."), which is also the name of a slice in
CUDA_VISIBLE_DEVICES. A GPU in MIG mode without a slice is not listed: nothing can run on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ..reading import GaugeAbsent, GaugeFailed, Reading, pci_name
from .library import LibrarySource, Unit


class NvidiaSource(LibrarySource):
    """The GPUs that NVML lists. Its state is global to the process; NVML counts how often it was opened. `root`: the
    folder that has /dev."""

    name: Final = "nvidia"
    preference = 2

    def __init__(self, root: Path = Path("/")) -> None:
        super().__init__()
        self._device = root / "dev/nvidiactl"
        self._nvml: Any = None
        self._slices: dict[Unit, Any] = {}

    def open(self) -> None:
        try:
            import pynvml
        except ImportError:
            raise GaugeAbsent("nvidia-ml-py is not installed: pip install 'tensord[nvidia]'") from None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            if error.value not in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
                raise
            if self._device.exists():
                raise GaugeFailed(f"{error}, and there is {self._device}") from error
            raise GaugeAbsent(str(error)) from error
        self._nvml = pynvml

    def units(self) -> list[Unit]:
        gpus = {index: self._slices_of(index) for index in range(int(self._nvml.nvmlDeviceGetCount()))}
        self._slices = {uuid: handle for slices in gpus.values() for uuid, handle in (slices or {}).items()}
        return [*(index for index, slices in gpus.items() if slices is None), *self._slices]

    def address(self, unit: int) -> str:
        """As in LibrarySource. NVML writes the PCI domain with eight digits; the kernel and torch use four."""
        found = self._nvml.nvmlDeviceGetPciInfo(self._gpu(unit))
        return pci_name(found.domain, found.bus, found.device)

    def memory(self, unit: Unit) -> Reading:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._slices[unit] if isinstance(unit, str) else self._gpu(unit))
        return Reading(int(memory.used), int(memory.total))

    def shut(self) -> None:
        self._nvml.nvmlShutdown()

    def _gpu(self, index: int) -> Any:
        return self._nvml.nvmlDeviceGetHandleByIndex(index)

    def _slices_of(self, index: int) -> dict[Unit, Any] | None:
        """The handles of a GPU's slices by UUID; None for a GPU that is not in MIG mode, or does not answer."""
        nvml = self._nvml
        try:
            gpu = self._gpu(index)
            if nvml.nvmlDeviceGetMigMode(gpu)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
                return None
            places = int(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu))
        except nvml.NVMLError:
            return None  # not supported by the GPU or by an older driver; or lost, which reading it will tell
        found: dict[Unit, Any] = {}
        for place in range(places):
            try:
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, place)
            except nvml.NVMLError_NotFound:
                continue
            found[str(nvml.nvmlDeviceGetUUID(handle))] = handle
        return found
