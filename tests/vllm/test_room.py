"""`tensorctl room` and a real server of vLLM, which is a neighbour: it is no client of the daemon.

The card is a fake one, as in test_sleeping.py. All else is vLLM's and tensord's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tensord.testing.fake_card import FakeCard

from ..client.device.card import CARD, card_folder, watching
from ..daemon_process import PATIENCE_S
from .api_servers import ApiServers

TOTAL_BYTES: Final = 100 << 20
SERVER_BYTES: Final = 60 << 20
SLEEP_MODE: Final = ("--enable-sleep-mode", "--worker-extension-cls", "engine_worker.Worker")


def test_an_idle_server_sleeps_to_make_room_and_answers_as_before_once_it_is_woken(model: Path, tmp_path: Path) -> None:
    with card_folder() as folder, FakeCard(folder, CARD, TOTAL_BYTES) as card:
        environ = {
            "VLLM_SERVER_DEV_MODE": "1",
            "ENGINE_CARD": f"{folder} {CARD} {SERVER_BYTES}",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }
        with ApiServers(model, tmp_path / "log", 1, environ, SLEEP_MODE) as server:
            server.wait_up()
            before = server.ask(1)
            assert card.reading()[0] == SERVER_BYTES and not server.sleeps()
            servers = f"vllm={server.url} on {CARD}"
            with watching(card, neighbours_servers=servers, neighbours_answer_s="5m") as daemon:
                daemon.start().until(lambda status: status["governor"]["gauges"], "the first sample")
                words = ["--socket", str(daemon.socket), "room", "80MiB", "--for", "1s", "--wait", "2m"]
                command = [sys.executable, "-m", "tensord.client.ctl", *words]
                made = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
            assert (made.returncode, server.sleeps(), card.reading()[0]) == (0, True, 0), made
            assert "freed 60.0 MiB" in made.stdout
            server.wake()
            assert card.reading()[0] == SERVER_BYTES
            assert server.ask(1) == before
