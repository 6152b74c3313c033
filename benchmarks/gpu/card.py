"""An NVIDIA card for gpu_check.py: its memory by NVML, registration of memory with its driver, and the report.

Does not own: any check or figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from tensord.client.gpu.torch_blocks import TorchBlocks

GIB: Final = 1 << 30
# The driver registers less than 64 GiB in one call.
CHUNK_BYTES: Final = 32 * GIB
ROUNDS: Final = 5
PATIENCE_S: Final = 60.0
"""Seconds until a check gives up; no measurement."""


class NoCard(Exception):
    """This machine has no card to check; the message says what is missing."""


def until(condition: Callable[[], Any], what: str) -> Any:
    """Waits until `condition` is true, and returns its value. Raises TimeoutError after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {PATIENCE_S:g} s")
        time.sleep(0.02)
    return found


@dataclass
class Report:
    """Checks, each with its observation, and figures. `held` is None if this machine cannot decide the check."""

    card: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, float | None] = field(default_factory=dict)

    def check(self, name: str, held: bool | None, seen: str) -> None:
        """Records and prints a check."""
        self.checks.append({"check": name, "held": held, "seen": seen})
        print(f"{_verdict(held):>12}  {name}: {seen}", flush=True)

    def table(self) -> str:
        """All checks, the failed ones first, then those that this machine could not decide."""
        order = {False: 0, None: 1, True: 2}
        width = max((len(check["check"]) for check in self.checks), default=0)
        lines = [
            f"{_verdict(check['held']):<11}  {check['check']:<{width}}  {check['seen']}".rstrip()
            for check in sorted(self.checks, key=lambda check: order[check["held"]])
        ]
        counts = [sum(check["held"] is held for check in self.checks) for held in (True, False, None)]
        return "\n".join([*lines, "{} held, {} failed, {} could not be decided here".format(*counts)])

    def figure(self, name: str, bytes_per_s: float | None) -> None:
        """Records and prints a figure, in GB/s."""
        self.figures[name] = None if bytes_per_s is None else bytes_per_s / 1e9
        told = "not measured" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f} GB/s"
        print(f"{'':>12}  {name}: {told}", flush=True)

    @property
    def failed(self) -> bool:
        return any(check["held"] is False for check in self.checks)


def _verdict(held: bool | None) -> str:
    return "cannot tell" if held is None else "held" if held else "FAILED"


class Nvml:
    """The card as NVML reports it."""

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
        """Processes with a context on the card, by the driver's pids; in a container these may be the host's pids."""
        return {process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}

    def settled(self, condition: Callable[[int], bool]) -> int:
        """Reads until `condition(used_bytes)` is true or 10 s have passed. Returns the last reading."""
        deadline = time.monotonic() + 10
        while not condition(used_bytes := self.used_bytes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return used_bytes


@contextmanager
def registered(address: int, length_bytes: int) -> Iterator[str]:
    """Registers this read-only mapping with the driver for the block. Yields "", or the driver's refusal."""
    card = TorchBlocks(0, print)
    done: list[int] = []
    why = ""
    try:
        for at in range(address, address + length_bytes, CHUNK_BYTES):
            why = card.register(at, min(CHUNK_BYTES, address + length_bytes - at))
            if why:
                break
            done.append(at)
        yield why
    finally:
        # Unregisters before the mapping and the process end.
        for at in done:
            card.unregister(at)
