"""Takes docs/page.png: the page for browsers, as Chromium shows it while a real daemon serves a made-up load.

    python -m docs.page [--to docs/page.png]

Needs `chromium` (Debian has it).
"""

from __future__ import annotations

import argparse
import base64
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

import tensord
from tensord.testing.fake_vram import FakeCard, FakeVram
from tests.browser import Browser
from tests.daemon_process import Daemon
from tests.ports import Port

LOAD_S: Final = 20.0
MIB: Final = 1 << 20


def main() -> None:
    """Runs the daemon, the load and the browser."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--to", type=Path, default=Path(__file__).with_name("page.png"), help="the picture")
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        FakeCard(Path(folder), "0000:65:00.0", 512 * MIB) as card,
        Port() as port,
        Daemon(
            http=f"127.0.0.1:{port.number}", ring_bytes="256MiB", gauges_device="file", gauges_file=card.gauge_file
        ) as daemon,
        Browser() as browser,
    ):
        daemon.start()
        engine, _ = daemon.client(name="engine-0"), daemon.client(name="engine-1")
        load(engine, FakeVram(card))
        tab = browser.open(f"http://127.0.0.1:{port.number}/")
        load(engine, FakeVram(card), 3.0)  # so that the page has rates
        asked.to.write_bytes(base64.b64decode(tab.picture()))
    print(f"wrote {asked.to}")


def load(client: tensord.Client, card: FakeVram, seconds: float = LOAD_S) -> None:
    """Asks for pictures, some far more often than others, and registers tensors on the card."""
    device, drawn = tensord.DeviceCache(client, card), np.random.default_rng(1)
    space = tensord.Namespace(model="example/vision", revision="1", dtype="uint8", processor="1")
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for number in map(int, drawn.zipf(1.2, 8)):
            key = space.key("encoder", "image", number.to_bytes(8, "little"))
            client.get_or_compute(key, partial(np.zeros, (64 << 10) * (1 + number % 40), np.uint8), tokens=256)
        if len(device) < 90:
            device.put(space.key("encoder", "image", drawn.bytes(8)), card.empty(4 * MIB, np.uint8), tokens=512)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
