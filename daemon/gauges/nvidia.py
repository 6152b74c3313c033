"""A source for NVIDIA GPUs, through nvidia-ml-py.

Owns: the calls of NVML, also for the list of a GPU's processes; when NVML is opened and closed; and the names of the
GPUs that it has listed.

NVML needs and creates no GPU context. Used bytes are those that NVML reports; they include the driver's reserve.

A unit is what becomes a gauge: a GPU, by its index; or a slice of one, by its UUID ("MIG-..."), which is also the name
of a slice in CUDA_VISIBLE_DEVICES. In place of a GPU in MIG mode its slices are listed, which are made and destroyed
while the driver runs. A GPU in MIG mode without a slice is not listed: nothing can run on it.

NVML is opened at the first reading. If every GPU fails, it is opened again, at the earliest REOPEN_S after the last
time: a library opened before its driver was reloaded gets no answers.

Invariant: a GPU that was listed once is in every later result, as a failure if it cannot be read, unless its slices
are listed in its place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from .processes import listed
from .reading import GaugeAbsent, GaugeFailed, Reading, Result, one_line, pci_name

Unit = int | str
REOPEN_S: Final = 10.0
"""Seconds between two openings. Opening a library can take longer than a hundred readings."""


class NvidiaSource:
    """NVML as a Source. Its state is global to the process; NVML counts how often it was opened.

    Args:
        root: the folder that has /dev and /proc.
    """

    name: Final = "nvidia"

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._device = root / "dev/nvidiactl"
        self._nvml: Any = None
        self._opened_at: float | None = None
        self._handles: dict[Unit, Any] = {}
        self._sliced: set[int] = set()
        self._names: dict[int, str] = {}
        self._listed: dict[str, int] = {}

    def read(self, now: float) -> Result:
        """As in Source."""
        try:
            if self._opened_at is None:
                self._open()
                self._opened_at = now
            result = self._read_all(self._units())
        except Exception as error:
            self._reopen_later(now)
            raise error if isinstance(error, GaugeFailed) else GaugeFailed(one_line(error)) from error
        if not any(isinstance(each, Reading) for each in result.values()):
            self._reopen_later(now)
        if not result:
            raise GaugeAbsent("the library lists no GPU")
        return result

    def close(self) -> None:
        """As in Source."""
        if self._opened_at is None:
            return
        self._opened_at = None
        self._names.clear()
        self._handles.clear()
        try:
            self._nvml.nvmlShutdown()
        except Exception:
            # The library has failed before, and that failure was logged when it was read.
            return

    def _open(self) -> None:
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

    def _reopen_later(self, now: float) -> None:
        if self._opened_at is not None and now - self._opened_at >= REOPEN_S:
            self.close()

    def _units(self) -> list[Unit]:
        """What NVML lists now."""
        self._sliced = set()
        self._handles = {unit: handle for unit, handle in self._handles.items() if isinstance(unit, int)}
        found: list[Unit] = []
        for index in range(int(self._nvml.nvmlDeviceGetCount())):
            slices = self._slices(index)
            if slices is None:
                found.append(index)
                continue
            self._sliced.add(index)
            self._handles |= slices
            found += slices
        return found

    def _read_all(self, units: list[Unit]) -> Result:
        result: Result = {}
        for unit in units:
            name = unit if isinstance(unit, str) else f"{self.name}:{unit}"
            try:
                name = unit if isinstance(unit, str) else self._name(unit)
                result[name] = self._read(unit)
            except GaugeFailed as failed:
                result[name] = failed
            except Exception as error:
                result[name] = GaugeFailed(one_line(error))
        for name, index in self._listed.items():
            if index not in self._sliced:
                result.setdefault(name, GaugeFailed("the driver no longer lists this GPU"))
        return result

    def _name(self, index: int) -> str:
        """The name of a GPU. NVML writes the PCI domain with eight digits; the kernel and torch use four."""
        if index not in self._names:
            found = self._nvml.nvmlDeviceGetPciInfo(self._handle(index))
            self._names[index] = pci_name(found.domain, found.bus, found.device)
            self._listed[self._names[index]] = index
        return self._names[index]

    def _read(self, unit: Unit) -> Reading:
        handle = self._handles[unit] if isinstance(unit, str) else self._handle(unit)
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        reading = Reading(int(memory.used), int(memory.total))
        try:
            used = self._processes(handle)
            return reading if used is None else reading.showing(listed(used, self._root))
        except Exception:
            # What a driver says of processes is for people. The memory was read.
            return reading

    def _handle(self, index: int) -> Any:
        if index not in self._handles:
            self._handles[index] = self._nvml.nvmlDeviceGetHandleByIndex(index)
        return self._handles[index]

    def _processes(self, handle: Any) -> dict[int, int | None] | None:
        """The bytes of each process by its pid; None if the driver lists no processes."""
        nvml = self._nvml
        found: dict[int, int | None] | None = None
        for ask in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
            try:
                processes = ask(handle)
            except nvml.NVMLError:
                continue  # not supported by the GPU, by its slice, or by an older driver
            found = {} if found is None else found
            for each in processes:
                # A process that computes and draws is in both lists, with all of its bytes.
                known = found.get(int(each.pid))
                size_bytes = None if each.usedGpuMemory is None else int(each.usedGpuMemory)
                found[int(each.pid)] = size_bytes if known is None else max(known, size_bytes or 0)
        return found

    def _slices(self, index: int) -> dict[Unit, Any] | None:
        """The handles of a GPU's slices by UUID; None for a GPU that is not in MIG mode, or does not answer."""
        nvml = self._nvml
        try:
            gpu = self._handle(index)
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
