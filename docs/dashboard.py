"""Draws docs/dashboard.png: the Grafana dashboard of ops/, from what a real Prometheus scraped of a daemon under load.

    python -m docs.dashboard [--seconds 240] [--to docs/dashboard.png]

Needs `prometheus` (Debian has it) and matplotlib (`pip install tensord[pictures]`). Every panel's expressions are those
of ops/grafana.json; Prometheus evaluates them. Only the drawing is not Grafana's. The load is made up (load.py).
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import textwrap
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np

from docs.load import CARD, CARD_BYTES, MIB, Load, free_port, running, running_daemon, until
from tensord.testing.fake_vram import FakeCard

mpl.use("agg")
import matplotlib.pyplot as plt

ROOT: Final = Path(__file__).parents[1]
DASHBOARD: Final = ROOT / "ops" / "grafana.json"
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
        control = stack.enter_context(running_daemon(folder, card.gauge_file, metrics_listen=f"127.0.0.1:{metrics}"))
        prometheus = stack.enter_context(running_prometheus(folder, metrics, at))
        began = time.time()
        load = Load(control, card)
        load.run(asked.seconds)
        draw(json.loads(DASHBOARD.read_text()), prometheus, began + 4 * SCRAPE_S, time.time() - SCRAPE_S, asked.to)
    print(f"wrote {asked.to}")


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
