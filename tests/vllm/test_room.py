"""`tensorctl room` and a real server of vLLM, which is a neighbour: it is no client of the daemon.

The card is a fake one, as in test_sleeping.py. All else is vLLM's and tensord's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tensord.testing.fake_card import FakeCard

from ..client.device.card import CARD, card_folder, watching
from ..daemon_process import PATIENCE_S, Daemon
from .api_servers import ApiServers

TOTAL_BYTES: Final = 100 << 20
SERVER_BYTES: Final = 60 << 20
SLEEP_MODE: Final = ("--enable-sleep-mode", "--worker-extension-cls", "engine_worker.Worker")
RUNNING: Final = "vllm:num_requests_running"


@dataclass
class Stand:
    """A server of vLLM on a card, and a daemon that knows it as a neighbour."""

    card: FakeCard
    server: ApiServers
    daemon: Daemon

    def used(self) -> int:
        return self.card.reading()[0]

    def room(self, size: str, *, wait: str = "2m") -> subprocess.CompletedProcess[str]:
        words = ["--socket", str(self.daemon.socket), "room", size, "--for", "1s", "--wait", wait]
        command = [sys.executable, "-m", "tensord.client.ctl", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def stand(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    log = tmp_path_factory.mktemp("server") / "log"
    with card_folder() as folder, FakeCard(folder, CARD, TOTAL_BYTES) as card:
        environ = {
            "VLLM_SERVER_DEV_MODE": "1",
            "ENGINE_CARD": f"{folder} {CARD} {SERVER_BYTES}",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }
        with ApiServers(model, log, 1, environ, SLEEP_MODE) as server:
            server.wait_up()
            servers = f"vllm={server.url} on {CARD}"
            with watching(card, neighbours_servers=servers, neighbours_answer_s="5m") as daemon:
                daemon.start().until(lambda status: status["governor"]["gauges"], "the first sample")
                yield Stand(card, server, daemon)


def test_an_idle_server_sleeps_to_make_room_and_answers_as_before_once_it_is_woken(stand: Stand) -> None:
    before = stand.server.ask(1)
    assert stand.used() == SERVER_BYTES and not stand.server.sleeps()
    made = stand.room("80MiB")
    assert (made.returncode, stand.server.sleeps(), stand.used()) == (0, True, 0), made
    assert "freed 60.0 MiB" in made.stdout
    stand.server.wake()
    assert stand.used() == SERVER_BYTES
    assert stand.server.ask(1) == before
