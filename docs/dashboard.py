"""Draws docs/dashboard.png: the Grafana dashboard of ops/, from what a real Prometheus scraped of a daemon under load.

    python docs/dashboard.py [--seconds 240] [--to docs/dashboard.png]

Needs `prometheus` (Debian has it) and matplotlib (`pip install tensord[pictures]`). Every panel's expressions are those
of ops/grafana.json; Prometheus evaluates them. Only the drawing is not Grafana's. The load is made up: payloads of
popular keys, sequences that share prefixes, and tensors on a stand-in card that fills up and is freed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np

import tensord
from tensord import NormalLayer, PrefixCache
from tensord.testing.fake_vram import FakeCard, FakeVram

mpl.use("agg")
import matplotlib.pyplot as plt

ROOT: Final = Path(__file__).parents[1]
DASHBOARD: Final = ROOT / "ops" / "grafana.json"
MIB: Final = 1 << 20
CARD: Final = "0000:65:00.0"
CARD_BYTES: Final = 512 * MIB
SCRAPE_S: Final = 2
UNITS: Final = {"bytes": "MiB", "Bps": "MiB/s", "percentunit": "%", "ops": "/s", "reqps": "/s", "s": "s"}
SCALES: Final = {"bytes": 1 / MIB, "Bps": 1 / MIB, "percentunit": 100.0}
ROW_INCHES: Final = 0.42
"""The height of one unit of Grafana's grid, of which a page is 24 wide."""


def main() -> None:
    """Runs the daemon, Prometheus and the load, and draws."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=240, help="duration of the load")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "dashboard.png", help="the picture")
    asked = parser.parse_args()
    if shutil.which("prometheus") is None:
        sys.exit("prometheus is missing: run 'apt-get install prometheus' as root, then this again")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        card = stack.enter_context(FakeCard(folder, CARD, CARD_BYTES))
        metrics, at = free_port(), free_port()
        control = stack.enter_context(running_daemon(folder, card.gauge_file, metrics))
        prometheus = stack.enter_context(running_prometheus(folder, metrics, at))
        began = time.time()
        load = Load(control, card)
        load.run(asked.seconds)
        draw(json.loads(DASHBOARD.read_text()), prometheus, began + 4 * SCRAPE_S, time.time() - SCRAPE_S, asked.to)
    print(f"wrote {asked.to}")


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
def running_daemon(folder: Path, gauge_file: Path, port: int) -> Iterator[Path]:
    """A daemon of its own instance; yields its socket."""
    control = folder / "control.sock"
    settings = {
        "instance": f"dashboard-{os.getpid()}",
        "ring-bytes": "256MiB",
        "socket": control,
        "gauges-device": "file",
        "gauges-file": gauge_file,
        "gauges-sample-s": "0.5",
        "metrics-listen": f"127.0.0.1:{port}",
    }
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    with running([sys.executable, "-m", "tensord.daemon", *flags]):
        until(control.exists)
        yield control


@contextmanager
def running_prometheus(folder: Path, metrics: int, port: int) -> Iterator[str]:
    """Prometheus, scraping the daemon; yields its address."""
    configuration = folder / "prometheus.yml"
    text = (ROOT / "ops" / "prometheus.yml").read_text()
    text = text.replace("15s", f"{SCRAPE_S}s").replace("9477", str(metrics))
    configuration.write_text(text.replace("alerts.yml", str(ROOT / "ops" / "alerts.yml")))
    address = f"http://127.0.0.1:{port}"
    command = [
        "prometheus",
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with running(command):
        until(lambda: is_ready(address))
        yield address


def is_ready(address: str) -> bool:
    """True once Prometheus answers."""
    try:
        with urllib.request.urlopen(f"{address}/-/ready", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def until(true: Any) -> None:
    """Waits up to a minute."""
    ends = time.monotonic() + 60
    while not true():
        if time.monotonic() > ends:
            sys.exit("a process did not start within 60 s")
        time.sleep(0.05)


class Load:
    """What clients do: payloads of popular keys, sequences that share prefixes, and tensors on a card."""

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


@dataclass(frozen=True)
class Series:
    """One line of a panel: its legend, times in seconds and values."""

    legend: str
    times: list[float]
    values: list[float]


def asked_of(prometheus: str, target: dict[str, Any], began: float, ended: float) -> list[Series]:
    """The series of one expression."""
    expression = target["expr"].replace("$__rate_interval", f"{5 * SCRAPE_S}s").replace("$instance", ".*")
    # Ranges of minutes are for hours of data.
    for minutes in ("[10m]", "[5m]"):
        expression = expression.replace(minutes, f"[{15 * SCRAPE_S}s]")
    query = urllib.parse.urlencode({"query": expression, "start": began, "end": ended, "step": SCRAPE_S})
    with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{query}", timeout=30) as answer:
        found = json.load(answer)["data"]["result"]
    return [
        Series(
            legend(target["legendFormat"], each["metric"]),
            [at - began for at, _ in each["values"]],
            [float(value) for _, value in each["values"]],
        )
        for each in found
    ]


def legend(pattern: str, labels: dict[str, str]) -> str:
    """Grafana's legendFormat, filled in."""
    for name, value in labels.items():
        pattern = pattern.replace("{{" + name + "}}", value)
    return pattern


def draw(dashboard: dict[str, Any], prometheus: str, began: float, ended: float, to: Path) -> None:
    """Draws every panel at its place."""
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    figure = plt.figure(figsize=(16, height * ROW_INCHES), facecolor="white")
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        left, top = place["x"] / 24, place["y"] / height
        width, tall = place["w"] / 24, place["h"] / height
        if panel["type"] == "row":
            figure.text(0.01, 1 - top - tall * 0.7, panel["title"], fontsize=13, weight="bold")
            continue
        series = [each for target in panel["targets"] for each in asked_of(prometheus, target, began, ended)]
        if panel["type"] == "stat":
            draw_number(figure, panel, series, left + width / 2, 1 - top - tall / 2)
        else:
            inside = (left + 0.03, 1 - top - tall * 0.86, width - 0.045, tall * 0.7)
            draw_lines(figure.add_axes(inside), panel, series)
    figure.savefig(to, dpi=70)


def draw_number(figure: Any, panel: dict[str, Any], series: list[Series], x: float, y: float) -> None:
    """The last value of a panel, in words."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    value = series[0].values[-1] * SCALES.get(unit, 1.0) if series else math.nan
    figure.text(x, y - 0.004, f"{value:.3g} {UNITS.get(unit, '')}", fontsize=20, ha="center", color="#1a7f37")
    figure.text(x, y + 0.014, panel["title"], fontsize=10, ha="center")


def draw_lines(axes: Any, panel: dict[str, Any], series: list[Series]) -> None:
    """The series of a panel over time."""
    defaults = panel["fieldConfig"]["defaults"]
    unit = defaults["unit"]
    for each in series:
        style = "steps-post" if defaults.get("mappings") else "default"
        values = np.array(each.values) * SCALES.get(unit, 1.0)
        axes.plot(each.times, values, label=each.legend, linewidth=1.4, drawstyle=style)
    axes.set_title(panel["title"], fontsize=10, loc="left")
    axes.set_ylabel(UNITS.get(unit, ""), fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.set_ylim(bottom=0)
    for mapping in defaults.get("mappings", ()):
        words = {int(value): shown["text"] for value, shown in mapping["options"].items()}
        axes.set_yticks(list(words), [textwrap.shorten(word, 16) for word in words.values()])
    if series:
        axes.legend(fontsize=7, loc="best", framealpha=0.6)


if __name__ == "__main__":
    main()
