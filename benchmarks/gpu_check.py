"""Checks and times the device cache on a real NVIDIA card. Run this first on a machine with one.

    python benchmarks/gpu_check.py [--json PATH] [--device 0] [--entries 8] [--entry-bytes 67108864]

Takes some minutes. It needs tensord[torch,nvidia], torch with CUDA, and about 1 GiB of free memory on the card and in
/dev/shm; nothing else has to be stopped or configured. A second card, and root for the check of a small /dev/shm, are
used if they are there. Where vLLM with CUDA is installed, the KV connector's copies are checked too (gpu/kv.py).


It starts daemons of its own. First it checks that the daemon's gauge is the card's, that entries of a DeviceCache are
offloaded into the ring and come back bit-identical, that the driver gets the memory back, and that the daemon has no
GPU context; and times copies from the ring to the card, with the ring unregistered and registered with the driver. Then
it plays scenes (gpu/scenes.py): settings of torch's allocator, CUDA_VISIBLE_DEVICES, a second card, captures of CUDA
graphs, forks, two owners, an emergency, late streams, both ways of an offload, and Docker's /dev/shm of 64 MiB.

It ends with a table of all checks. "cannot tell" is for what this machine cannot decide; it says why. The exit status
is 0 if no check failed, 1 if one did, 2 if there is no card. Please send the table, or the file of --json, with a
report.

Owns: its checks and figures; no figure is asserted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from gpu.card import PATIENCE_S, ROUNDS, NoCard, Nvml, Report, registered, until
from gpu.kv import check_kv
from gpu.play import play, plays
from peers.harness import table
from peers.tensord_peer import serving
from peers.worker import key_of

import tensord
from tensord.client.device.torch_device import TorchDevice
from tensord.errors import UsageError
from tensord.shm.payloads.tensors import tensor_over

MIB: Final = 1 << 20
SCENE_BYTES_MAX: Final = 16 * MIB
IDLE_S: Final = 3.0
# Other programs may use the card meanwhile. The changes that the checks look for are far larger.
NOISE_BYTES: Final = 192 * MIB


# ---- tensors


def tree_on(device: Any, torch: Any, size_bytes: int, seed: int) -> dict[str, Any]:
    """Random bits, three quarters of `size_bytes` as bfloat16 and one quarter as float8 if torch has float8."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def raw(count_bytes: int) -> Any:
        return torch.randint(0, 256, (count_bytes,), dtype=torch.uint8, device=device, generator=generator)

    quarter_bytes = size_bytes // 4 // 4096 * 4096
    narrow = getattr(torch, "float8_e4m3fn", torch.int8)
    return {
        "hidden": raw(3 * quarter_bytes).view(torch.bfloat16).view(-1, 1024),
        "scales": [raw(quarter_bytes).view(narrow).view(-1, 512), seed],
    }


def bits_of(tree: Any, torch: Any) -> bytes:
    """The tensors' bytes, by torch alone: the comparison uses no code of tensord."""
    leaves = [tree["hidden"], tree["scales"][0]]
    return b"".join(leaf.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() for leaf in leaves)


# ---- the checks


def check_gauge(report: Report, client: tensord.Client, nvml: Nvml, name: str) -> None:
    """The daemon's gauge shows this card, and reads it through NVML."""

    def row() -> Any:
        gauges = client.status()["governor"]["gauges"]
        return next((gauge for gauge in gauges if gauge["gauge"] == name and gauge["total_bytes"]), None)

    try:
        found = until(row, f"a gauge called {name}")
    except TimeoutError as error:
        known = [gauge["gauge"] for gauge in client.status()["governor"]["gauges"]]
        report.check("the daemon's gauge is the card's", False, f"{error}; the daemon has {known}")
        return
    read_bytes = nvml.used_bytes()
    report.check(
        "the daemon's gauge is the card's",
        abs(found["used_bytes"] - read_bytes) < NOISE_BYTES and not found["stale"],
        f"{found['source']} says {_mib(found['used_bytes'])}, NVML {_mib(read_bytes)}, of {_mib(found['total_bytes'])}",
    )


def check_cache(
    report: Report, client: tensord.Client, device: TorchDevice, nvml: Nvml, torch: Any, entries: int, entry_bytes: int
) -> None:
    """Idle entries leave for the ring, the driver gets their memory back, and the entries come back bit-identical."""
    keys = [key_of("gpu_check", entry_bytes, number) for number in range(entries)]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before_bytes = nvml.used_bytes()
    with tensord.DeviceCache(client, device) as cache:
        card = f"cuda:{torch.cuda.current_device()}"
        trees = [tree_on(card, torch, entry_bytes, number) for number in range(entries)]
        expected = [bits_of(tree, torch) for tree in trees]
        # All entries are registered well before the first one is idle for long enough to leave.
        registrations = [cache.put(key, tree, tokens=0) for key, tree in zip(keys, trees, strict=True)]
        trees.clear()
        gc.collect()
        held_bytes = nvml.used_bytes()
        for registration in registrations:
            registration.wait(PATIENCE_S)
            if registration.state != "registered":
                report.check("entries are registered", False, f"{registration.state}: {registration.error}")
                return

        def offloaded() -> int:
            return int(client.status()["governor"]["counters"]["offloaded"])

        started = time.monotonic()
        until(lambda: offloaded() >= entries, f"{entries} entries offloaded")
        took_s = time.monotonic() - started
        report.check("idle entries are offloaded", True, f"{entries} of {_mib(entry_bytes)} in {took_s:.2f} s")
        after_bytes = nvml.settled(lambda used_bytes: held_bytes - used_bytes >= entries * entry_bytes * 9 // 10)
        report.check(
            "the driver gets the memory back",
            held_bytes - after_bytes >= entries * entry_bytes * 9 // 10,
            f"NVML: {_mib(before_bytes)} before, {_mib(held_bytes)} with the entries, {_mib(after_bytes)} after",
        )

        first, tiers, wrong, slowest_s = cache.get(keys[0]), [], 0, 0.0
        report.check(
            "an offloaded entry is a hit in the host tier",
            first is not None and first.tier == "host",
            "a miss" if first is None else f"tier {first.tier}",
        )
        del first
        for number, (key, bits) in enumerate(zip(keys, expected, strict=True)):
            started = time.monotonic()
            with until(partial(cache.get, key, promote=True), "an offloaded entry") as lease:
                slowest_s = max(slowest_s, time.monotonic() - started)
                tiers.append(str(lease.tier))
                tree = lease.tree
                on_card = getattr(tree["hidden"], "is_cuda", False)
                wrong += not on_card or bits_of(tree, torch) != bits or tree["scales"][1] != number
        report.check(
            "promoted entries are bit-identical, on the card",
            wrong == 0 and tiers == ["device"] * entries,
            f"{entries - wrong} of {entries}; tiers {sorted(set(tiers))}; the slowest took {slowest_s * 1e3:.1f} ms",
        )


def check_context(report: Report, client: tensord.Client, nvml: Nvml) -> None:
    """The daemon has no context on the card: NVML lists none, and the daemon has mapped no memory of the driver's. NVML
    itself loads libcuda.so.1 and opens /dev/nvidia-uvm (seen with driver 580), so these decide nothing."""
    pid = int(client.status()["pid"])
    pids = nvml.pids()
    # In a container the driver may list the host's pids. Then this process is not listed either, and the check is
    # undecided.
    held = pid not in pids if os.getpid() in pids else None
    report.check(
        "NVML lists no context of the daemon", held, f"daemon {pid}, ours {os.getpid()}, listed {sorted(pids)}"
    )
    mapped = {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    found = sorted(path for path in mapped if "nvidia" in path or "libcuda" in path)
    report.check(
        "the daemon has mapped no memory of the driver's",
        not any(path.startswith("/dev/nvidia") for path in found),
        f"mapped files of the driver: {found or 'none'}",
    )


def time_copies(report: Report, client: tensord.Client, torch: Any, entries: int, entry_bytes: int) -> None:
    """GB/s from the ring to the card: through pageable memory, by TorchDevice, and registered with the driver."""
    keys = [key_of("gpu_check ring", entry_bytes, number) for number in range(entries)]
    generator = np.random.default_rng(11)
    for key in keys:
        put = client.put(key, generator.integers(0, 256, entry_bytes, np.uint8), wait=True, timeout_s=PATIENCE_S)
        if put.state not in ("stored", "existed"):
            report.check("payloads are in the ring", False, f"{put.state}: {put.error}")
            return
    leases = [lease for key in keys if (lease := client.get(key)) is not None]
    sources = [tensor_over(torch, lease.tree) for lease in leases]
    into = [torch.empty(entry_bytes, dtype=torch.uint8, device="cuda") for _ in sources]

    def copied() -> None:
        for target, source in zip(into, sources, strict=True):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    def rate(copy: Callable[[], object]) -> float:
        copy()
        times_s = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            copy()
            times_s.append(time.perf_counter() - started)
        return len(sources) * entry_bytes / median(times_s)

    def whole() -> bool:
        good = [torch.equal(target.cpu(), source) for target, source in zip(into, sources, strict=True)]
        for target in into:
            target.zero_()
        return all(good) and len(good) == entries

    report.figure("ring → card, not registered", rate(copied))
    pageable_whole = whole()
    device = TorchDevice(torch.cuda.current_device())
    report.figure(
        "ring → card, by TorchDevice.to_device", rate(lambda: device.to_device([lease.tree for lease in leases]))
    )
    # The client has no call for the mapping of the ring yet; the view has it.
    view = client.link.view
    assert view is not None
    ring: np.ndarray[Any, Any] = np.frombuffer(view._ring, np.uint8)
    started = time.perf_counter()
    with registered(ring.ctypes.data, len(ring)) as why:
        took_s = time.perf_counter() - started
        if why:
            report.check("a read-only ring can be registered with the driver", None, why)
            report.figure("ring → card, registered", None)
        else:
            report.check(
                "a read-only ring can be registered with the driver", True, f"{_mib(len(ring))} in {took_s:.3f} s"
            )
            report.figure("ring → card, registered", rate(copied))
            report.check("copies from the ring are bit-identical", pageable_whole and whole(), "both ways")
        torch.cuda.synchronize()


# ---- the run


def the_card(index: int) -> tuple[Any, TorchDevice, Nvml]:
    """Torch, the card and its NVML side. Raises NoCard."""
    try:
        import torch
    except ImportError as error:
        raise NoCard(f"torch cannot be imported ({error}); install tensord[torch] with a CUDA build") from None
    if not torch.cuda.is_available() or torch.version.hip:
        raise NoCard(f"torch {torch.__version__} sees no NVIDIA card on this machine")
    try:
        import pynvml  # noqa: F401
    except ImportError:
        raise NoCard("nvidia-ml-py is missing; install tensord[nvidia]") from None
    try:
        device = TorchDevice(index)
    except UsageError as error:
        raise NoCard(str(error)) from None
    torch.cuda.set_device(index)
    torch.zeros(1, device="cuda")
    return torch, device, Nvml(device.name)


def run(index: int, entries: int, entry_bytes: int) -> Report:
    """All checks and figures. Raises NoCard."""
    torch, device, nvml = the_card(index)
    report = Report()
    report.card = {**nvml.about(), "device": device.name, "torch": torch.__version__, "cuda": torch.version.cuda}
    for what, value in report.card.items():
        print(f"{what:>12}  {value}")
    ring_bytes = -(-max(2 * entries * entry_bytes * 5 // 4, 256 * MIB) // MIB) * MIB
    # In every mode an entry that is idle for a moment leaves: the fill level of the card must not matter.
    flags = [
        *("--gauges-device", "nvidia", "--gauges-host", "none"),
        *("--gauges-sample-s", "0.05", "--gauges-sample-pressed-s", "0.05"),
        *("--pressure-normal", "0.95", "--pressure-pressure", "0.97", "--pressure-critical", "0.98"),
        *("--pressure-emergency", "0.995", "--pressure-hysteresis", "0.001"),
        *("--pressure-relaxed-idle-s", str(IDLE_S), "--pressure-normal-idle-s", str(IDLE_S)),
    ]
    with (
        serving(ring_bytes, *flags) as daemon,
        tensord.Client(daemon.socket, name="gpu_check", timeout_s=PATIENCE_S) as client,
    ):
        check_gauge(report, client, nvml, device.name)
        check_cache(report, client, device, nvml, torch, entries, entry_bytes)
        check_context(report, client, nvml)
        check_kv(report, str(daemon.socket), client, torch, index)
        time_copies(report, client, torch, entries, entry_bytes)
    torch.cuda.empty_cache()
    for one in plays(torch.cuda.device_count()):
        play(report, one, index, min(entry_bytes, SCENE_BYTES_MAX))
    return report


def _mib(count_bytes: int) -> str:
    return f"{count_bytes / MIB:,.0f} MiB"


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Checks and times what only a real NVIDIA card can show.")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write checks and figures there")
    parser.add_argument("--device", type=int, default=0, metavar="INDEX", help="which card, as torch counts")
    parser.add_argument("--entries", type=int, default=8, metavar="N", help="entries to offload, and to time")
    parser.add_argument("--entry-bytes", type=int, default=64 * MIB, metavar="BYTES", help="the size of each")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """0: all held; 1: something did not; 2: there is no card."""
    asked = _arguments(words)
    try:
        report = run(asked.device, asked.entries, asked.entry_bytes)
    except NoCard as missing:
        print(f"nothing was checked: {missing}", file=sys.stderr)
        return 2
    rows: list[Sequence[str]] = [
        (name, "not measured" if value is None else f"{value:.2f} GB/s") for name, value in report.figures.items()
    ]
    print()
    print(table(["copies", "measured"], rows))
    print()
    print(report.table())
    if asked.json is not None:
        asked.json.write_text(json.dumps(asdict(report), indent=2) + "\n")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
