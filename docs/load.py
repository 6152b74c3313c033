"""A daemon with a made-up load, of which the pictures of the documentation are taken.

Owns: the processes, and the load: payloads of popular keys, sequences that share prefixes, and tensors on a stand-in
card that fills up and is freed. Does not own the pictures (dashboard.py, page.py).
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

import tensord
from tensord import NormalLayer, PrefixCache
from tensord.testing.fake_vram import FakeCard, FakeVram

MIB: Final = 1 << 20
CARD: Final = "0000:65:00.0"
CARD_BYTES: Final = 512 * MIB


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


@contextmanager
def running(command: list[str]) -> Iterator[None]:
    """A process, ended by SIGINT: the daemon then removes its memory."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


@contextmanager
def running_daemon(folder: Path, gauge_file: Path, **more: object) -> Iterator[Path]:
    """A daemon of its own instance, with `more` settings; yields its socket."""
    control = folder / "control.sock"
    settings = {
        "instance": f"pictures-{os.getpid()}",
        "ring-bytes": "256MiB",
        "socket": control,
        "gauges-device": "file",
        "gauges-file": gauge_file,
        "gauges-sample-s": "0.5",
        **more,
    }
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with running([sys.executable, "-m", "tensord.daemon", *flags]):
        until(control.exists)
        yield control


def until(true: Callable[[], object]) -> None:
    """Waits up to a minute."""
    ends = time.monotonic() + 60
    while not true():
        if time.monotonic() > ends:
            sys.exit("a process did not start within 60 s")
        time.sleep(0.05)


class Load:
    """The work of clients: payloads of popular keys, sequences that share prefixes, and tensors on a card."""

    def __init__(self, control: Path, card: FakeCard) -> None:
        self._client = tensord.Client(control)
        assert self._client.wait_connected(30)
        self._card = FakeVram(card)
        self._device = tensord.DeviceCache(self._client, self._card)
        self._space = tensord.Namespace(model="example/vision", revision="1", dtype="uint8", processor="1")
        language = tensord.Namespace(model="example/language", revision="1", dtype="float32", processor="1")
        self._prefixes = PrefixCache(self._client, self._client.current(language))
        self._drawn = np.random.default_rng(1)
        self._held: list[Any] = []
        self._turn = 0

    def run(self, seconds: float) -> None:
        """Turns of about 50 ms until the time is over. The card is fullest in the middle."""
        began = time.monotonic()
        while (part := (time.monotonic() - began) / seconds) < 1:
            self._turn += 1
            self._pictures()
            if self._turn % 5 == 0:
                self._sequence()
            self._fill(int(CARD_BYTES * (0.45 + 0.5 * math.sin(math.pi * part) ** 2)))
            time.sleep(0.05)

    def _pictures(self) -> None:
        for number in self._drawn.zipf(1.2, 8):
            key = self._space.key("encoder", "image", int(number).to_bytes(8, "little"))
            encode = partial(np.zeros, (64 << 10) * (1 + int(number) % 40), np.uint8)
            self._client.get_or_compute(key, encode, tokens=256)

    def _sequence(self) -> None:
        conversation = int(self._drawn.integers(12))
        turns = 300 + 40 * (self._turn // 5 % 20)
        tokens = np.concatenate([np.arange(512), np.full(turns, 1000 + conversation)]).astype(np.uint32)
        match = self._prefixes.match(tokens)
        if match is not None:
            with match:
                pass
        cached = np.zeros((1, 2, len(tokens), 8), np.float32)
        self._prefixes.put(tokens, [NormalLayer({"k": cached, "v": cached})])

    def _fill(self, wanted_bytes: int) -> None:
        """Registers tensors, of which the daemon takes what the card lacks, and allocates the engine's own."""
        block_bytes = 8 * MIB
        if self._turn % 4 == 0:
            tensor = self._card.empty(4 * MIB, np.uint8)
            key = self._space.key("encoder", "image", b"device" + self._turn.to_bytes(8, "little"))
            try:
                self._device.put(key, tensor, tokens=512)
            except tensord.errors.TensordError:
                pass  # refused in an emergency, as it has to be
        while len(self._held) * block_bytes < wanted_bytes - CARD_BYTES // 4:
            try:
                self._held.append(self._card.empty(block_bytes, np.uint8))
            except MemoryError:
                break
        while len(self._held) * block_bytes > wanted_bytes - CARD_BYTES // 4:
            self._held.pop()
