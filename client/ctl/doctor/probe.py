"""Tries the Python bindings of GPUs, each in its own process.

The bindings load drivers' libraries, and fail in different ways: amdsmi raises KeyError at import if its library is
missing, and its start moves descriptor 2; pyrsmi returns -1, or raises RuntimeError; a CPU build of torch raises
AssertionError; any of them may crash. `python -m tensord.client.ctl.doctor.probe NAME` tries one, and prints one line
of JSON: {"version": ..., "devices": ..., "error": ...}.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from ...identity.packages import package_version
from .software import Binding

_PROBE_S: Final = 30.0


def nvml() -> int:
    """Number of GPUs that NVML sees. Raises NVML's own errors."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def rsmi() -> int:
    """Number of GPUs that AMD's library sees. Fails if the memory of the first cannot be read."""
    from pyrsmi import rocml

    rocml.smi_initialize()
    # pyrsmi keeps the library's 64-bit handles as ints, which ctypes would cut to 32 bits when it passes them back.
    handles = getattr(rocml, "_processor_handles", [])
    handles[:] = [each if isinstance(each, ctypes.c_void_p) else ctypes.c_void_p(each) for each in handles]
    try:
        devices = int(rocml.smi_get_device_count())
        if devices and int(rocml.smi_get_device_memory_total(0)) < 0:
            raise RuntimeError("it counts the GPUs, but cannot read their memory")
        return max(0, devices)
    finally:
        rocml.smi_shutdown()


def torch() -> int:
    """Number of GPUs that torch can use."""
    import torch as there

    return int(there.cuda.device_count()) if there.cuda.is_available() else 0


# name: (package, extra, function that tries it)
BINDINGS: Final[dict[str, tuple[str, str, Callable[[], int]]]] = {
    "nvml": ("nvidia-ml-py", "nvidia", nvml),
    "rsmi": ("pyrsmi", "amd", rsmi),
    "torch": ("torch", "torch", torch),
}


def probed(
    names: Sequence[str] = tuple(BINDINGS), command: Sequence[str] = (), wait_s: float = _PROBE_S
) -> list[Binding]:
    """Tries all bindings at once, each in its own process. `command` replaces this module in tests."""
    run = [*(command or (sys.executable, "-m", __spec__.name))]
    running = {
        name: subprocess.Popen(
            [*run, name], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for name in names
        if package_version(BINDINGS[name][0]) is not None
    }
    return [_binding(name, running.get(name), wait_s) for name in names]


def _binding(name: str, process: subprocess.Popen[str] | None, wait_s: float) -> Binding:
    package, extra, _ = BINDINGS[name]
    version = package_version(package)
    if process is None:
        return Binding(name, package, extra, version)
    try:
        out, _ = process.communicate(timeout=wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Binding(name, package, extra, version, None, f"no answer within {wait_s:g} s")
    try:
        said: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return Binding(name, package, extra, version, said["devices"], said["error"])
    except (ValueError, IndexError, KeyError, TypeError):
        return Binding(name, package, extra, version, None, f"its process ended with {process.returncode}")


def main(name: str) -> None:
    """Tries one binding and prints the result."""
    # Libraries write to both streams. The result goes to the original stdout.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    devices, error = None, ""
    try:
        devices = BINDINGS[name][2]()
    except BaseException as failure:
        error = " ".join(f"{type(failure).__name__}: {failure}".split())
    answer.write(json.dumps({"devices": devices, "error": error}) + "\n")
    answer.flush()
    # Skips the unloading of libraries, which may crash.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
