"""The name of a GPU of this process, as the daemon's gauges have it. Owns: the calls of the driver that tell it.

A GPU is named by its PCI address, a MIG slice of an NVIDIA GPU by its UUID. The partitions of an AMD GPU share bus and
device; the function is the partition's number.
"""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any
from uuid import UUID

from ...errors import UsageError


def gpu_name(torch: ModuleType, accelerator: Any, index: int) -> str:
    """The name of torch's GPU `index`; its UUID in the form "gpu-..." if its address is unknown. Raises UsageError if
    neither is known."""
    if torch.version.hip:
        # Of torch's properties, none tells the function, in which the number of a partition is.
        name = _told_by_driver(index, hip=True) or _address(accelerator, index)
    else:
        name = _mig_slice(index) or _address(accelerator, index) or _told_by_driver(index, hip=False)
    uuid = getattr(accelerator.get_device_properties(index), "uuid", None)
    if not name and not uuid:
        raise UsageError(f"the PCI address of card {index} is unknown; pass name=")
    return name or f"gpu-{uuid}".lower()


def _address(accelerator: Any, index: int) -> str:
    """The PCI address as torch tells it; "" if it is unknown."""
    properties = accelerator.get_device_properties(index)
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    # Older versions of torch lack these properties. Bus 0, slot 0 is the host bridge, so such values mean unknown.
    if isinstance(domain, int) and isinstance(bus, int) and isinstance(slot, int) and (bus or slot):
        return f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    return ""


def _mig_slice(index: int) -> str:
    """The name of a MIG slice, as NVML has it; "" for a whole GPU. The first version of cuDeviceGetUuid tells the UUID
    of the GPU, the second one that of the slice."""
    whole, own = ctypes.create_string_buffer(16), ctypes.create_string_buffer(16)
    try:
        driver, number = _cuda(index)
        status = driver.cuDeviceGetUuid(whole, number) or driver.cuDeviceGetUuid_v2(own, number)
    except (OSError, AttributeError):
        return ""
    return "" if status or whole.raw == own.raw else f"MIG-{UUID(bytes=own.raw)}"


def _told_by_driver(index: int, *, hip: bool) -> str:
    """The PCI address from cuDeviceGetPCIBusId or hipDeviceGetPCIBusId, which need no context; "" if it is unknown."""
    told = ctypes.create_string_buffer(32)
    try:
        if hip:
            driver = _library("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
            status = driver.hipDeviceGetPCIBusId(told, len(told), ctypes.c_int(index))
        else:
            driver, number = _cuda(index)
            status = driver.cuDeviceGetPCIBusId(told, len(told), number)
        domain, bus, rest = told.value.decode("ascii").lower().split(":")
        return "" if status else f"{int(domain, 16):04x}:{bus}:{rest}"
    except (OSError, AttributeError, ValueError):
        return ""


def _cuda(index: int) -> tuple[Any, ctypes.c_int]:
    """NVIDIA's driver, and its number of a GPU. Raises OSError if there is no driver or no such GPU."""
    driver, number = _library("libcuda.so.1", "libcuda.so"), ctypes.c_int(index)
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(number), index):
        raise OSError(f"the driver knows no GPU {index}")
    return driver, number


def _library(first: str, *others: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(first)
    except OSError:
        if not others:
            raise
        return _library(*others)
