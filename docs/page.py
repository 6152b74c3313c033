"""Takes docs/page.png: the page for browsers, as Chromium shows it while a real daemon is under load.

    python -m docs.page [--seconds 40] [--to docs/page.png]

Needs `chromium` (Debian has it). The load is made up (load.py). The picture is taken when two thirds of the time are
over: then the card has been full, and is being freed.
"""

from __future__ import annotations

import argparse
import base64
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import tensord
from docs.load import CARD, CARD_BYTES, Load, free_port, running_daemon
from tensord.testing.fake_vram import FakeCard
from tests.browser import Browser


def main() -> None:
    """Runs the daemon, the load and the browser."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=40, help="duration of the load")
    parser.add_argument("--to", type=Path, default=Path(__file__).with_name("page.png"), help="the picture")
    asked = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        card = stack.enter_context(FakeCard(folder, CARD, CARD_BYTES))
        address = f"127.0.0.1:{free_port()}"
        control = stack.enter_context(running_daemon(folder, card.gauge_file, http=address, log_slow_s="2ms"))
        for name in ("engine-0", "engine-1"):
            assert stack.enter_context(tensord.Client(control, name=name)).wait_connected(30)
        load = threading.Thread(target=Load(control, card).run, args=(asked.seconds,))
        load.start()
        with Browser() as browser:
            tab = browser.open(f"http://{address}/")
            time.sleep(asked.seconds * 2 / 3)
            asked.to.write_bytes(base64.b64decode(tab.picture()))
        load.join()
    print(f"wrote {asked.to}")


if __name__ == "__main__":
    main()
