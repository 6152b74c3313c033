"""The name of a GPU as the daemon's gauges write it: its PCI address, such as 0000:65:00.0.

Owns: finding it, by torch or by the driver. Does not own: the GPU. Invariants: nothing here makes a GPU context.
"""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

from ...errors import UsageError

__all__ = ["name_of_card"]


def name_of_card(torch: ModuleType, accelerator: Any, index: int) -> str:
    """The GPU's PCI address in the form of the daemon's gauges; its UUID if the address is unknown."""
    properties = accelerator.get_device_properties(index)
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    # Older versions of torch lack these properties. Bus 0, slot 0 is the host bridge, so such values mean unknown.
    if isinstance(domain, int) and isinstance(bus, int) and isinstance(slot, int) and (bus or slot):
        return f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    try:
        return _told_by_driver(index, hip=bool(torch.version.hip))
    except (OSError, AttributeError, ValueError):
        uuid = getattr(properties, "uuid", None)
        if not uuid:
            raise UsageError(f"the PCI address of card {index} is unknown; pass name=") from None
        return f"gpu-{uuid}".lower()


def _told_by_driver(index: int, *, hip: bool) -> str:
    """The PCI address from cuDeviceGetPCIBusId or hipDeviceGetPCIBusId, which need no context."""
    told = ctypes.create_string_buffer(32)
    number = ctypes.c_int(index)
    if hip:
        status = _library("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6").hipDeviceGetPCIBusId(
            told, len(told), number
        )
    else:
        driver = _library("libcuda.so.1", "libcuda.so")
        status = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(number), index)
        status = status or driver.cuDeviceGetPCIBusId(told, len(told), number)
    if status != 0:
        raise ValueError(f"status {status}")
    domain, bus, rest = told.value.decode("ascii").lower().split(":")
    return f"{int(domain, 16):04x}:{bus}:{rest}"


def _library(*names: str) -> ctypes.CDLL:
    for name in names[:-1]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return ctypes.CDLL(names[-1])
