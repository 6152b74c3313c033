"""The cards on which scenes.py plays: real ones through torch, or stand-ins without a GPU.

Owns: making tensors, late streams and captures on either, and what the driver says of a card. Does not own: any check.

A stand-in card is a folder (tensord.testing). Tests run the scenes on it, so that on a real card only the card is new.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from gpu.card import NoCard, Nvml
from tensord.client.gpu.interface import Device
from tensord.errors import UsageError
from tensord.testing.fake_vram import FakeCard, FakeStream, FakeVram

LATE_S: Final = 0.3


class Bench(Protocol):
    """Cards, counted from 0 as torch counts them. `flags`: the daemon's, for the cards' gauges."""

    cards: int

    @property
    def flags(self) -> Sequence[str]: ...

    def device(self, index: int, *, gives_back: bool = True) -> Device: ...

    def tree(self, index: int, size_bytes: int, seed: int) -> Any:
        """Random bits on a card, made by the current stream."""

    def bits(self, tree: Any) -> bytes:
        """The bytes of a tree on the card or the host, without code of tensord's where possible."""

    def used_bytes(self, index: int) -> tuple[int, int]:
        """(used, total) bytes of a card, by its driver."""

    def has_context(self, index: int) -> bool | None:
        """Whether this process has a context on a card; None if the driver does not tell."""

    def late(self, index: int) -> AbstractContextManager[object]:
        """In the block the current stream is a new one, with work ahead that takes LATE_S."""

    def capture(self, index: int, meanwhile: Callable[[], object]) -> bool:
        """Captures a graph, calls `meanwhile` during it, and replays it. Whether the replay was right."""


class TorchBench:
    """NVIDIA cards."""

    flags = ("--gauges-device", "nvidia", "--gauges-host", "none")

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise NoCard(f"torch {torch.__version__} sees no NVIDIA card on this machine")
        self._torch = torch
        self.cards = torch.cuda.device_count()

    def device(self, index: int, *, gives_back: bool = True) -> Device:
        from tensord.client.device.torch_device import TorchDevice

        try:
            return TorchDevice(index, gives_back=gives_back)
        except UsageError as error:
            raise NoCard(str(error)) from None

    def tree(self, index: int, size_bytes: int, seed: int) -> Any:
        torch, device = self._torch, f"cuda:{index}"
        generator = torch.Generator(device=device).manual_seed(seed)
        raw = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device=device, generator=generator)
        return {"hidden": raw[: size_bytes // 2].view(torch.bfloat16), "rest": [raw[size_bytes // 2 :], seed]}

    def bits(self, tree: Any) -> bytes:
        torch = self._torch

        def raw(leaf: Any) -> bytes:
            if isinstance(leaf, np.ndarray):
                return leaf.tobytes()
            return bytes(leaf.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())

        return raw(tree["hidden"]) + raw(tree["rest"][0])

    def used_bytes(self, index: int) -> tuple[int, int]:
        nvml = Nvml(self.device(index).name)
        return nvml.used_bytes(), int(nvml.about()["total_bytes"])

    def has_context(self, index: int) -> bool | None:
        pids = Nvml(self.device(index).name).pids()
        # In a container the driver may list the host's pids.
        return os.getpid() in pids if any(Path(f"/proc/{pid}").exists() for pid in pids) else None

    @contextmanager
    def late(self, index: int) -> Iterator[None]:
        torch = self._torch
        with torch.cuda.device(index), torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(int(LATE_S * 1.5e9))
            yield

    def capture(self, index: int, meanwhile: Callable[[], object]) -> bool:
        torch = self._torch
        with torch.cuda.device(index):
            source = torch.arange(1024, device=f"cuda:{index}")
            target = torch.zeros_like(source)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                torch.add(source, 1, out=target)
                meanwhile()
                target.mul_(2)
            graph.replay()
            torch.cuda.synchronize()
            return bool((target == (source + 1) * 2).all())


class StandinBench:
    """Stand-in cards of `card_bytes` in a folder."""

    def __init__(self, folder: Path, cards: int = 2, card_bytes: int = 1 << 28) -> None:
        self.cards = cards
        self.folder = folder
        self._opened = [FakeCard(folder, f"card{index}", card_bytes) for index in range(cards)]
        self._devices: dict[int, FakeVram] = {}
        self.flags = ("--gauges-device", "file", "--gauges-file", str(folder / "gauges"), "--gauges-host", "none")

    def device(self, index: int, *, gives_back: bool = True) -> Device:
        if index >= self.cards:
            raise NoCard(f"there is no card {index}")
        return self._devices.setdefault(index, FakeVram(self._opened[index]))

    def tree(self, index: int, size_bytes: int, seed: int) -> Any:
        raw = np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)
        device: Any = self.device(index)
        return {"hidden": device.upload(raw[: size_bytes // 2]), "rest": [device.upload(raw[size_bytes // 2 :]), seed]}

    def bits(self, tree: Any) -> bytes:
        leaves = [tree["hidden"], tree["rest"][0]]
        return b"".join((leaf if isinstance(leaf, np.ndarray) else leaf.numpy()).tobytes() for leaf in leaves)

    def used_bytes(self, index: int) -> tuple[int, int]:
        return self._opened[index].reading()

    def has_context(self, index: int) -> bool | None:
        return index in self._devices

    @contextmanager
    def late(self, index: int) -> Iterator[None]:
        device: Any = self.device(index)
        with device.on(FakeStream()) as stream:
            stream.delay_s = LATE_S / 10
            yield

    def capture(self, index: int, meanwhile: Callable[[], object]) -> bool:
        with self.device(index).pause():
            meanwhile()
        return True


def bench_of(standin: str | None) -> Bench:
    """The cards of this machine; with `standin`, stand-in cards in this folder, or in a new one if it is empty."""
    if standin is None:
        return TorchBench()
    return StandinBench(Path(standin or tempfile.mkdtemp(prefix="tensord-cards-")))
