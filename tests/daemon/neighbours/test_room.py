"""`tensorctl room` with a real daemon and stand-in servers, whose memory a gauge file shows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import tensord
from tensord.daemon.config.config import Config
from tensord.errors import DeviceFull
from tensord.testing import FakeCard, FakeVram

from ...daemon_process import Daemon, until
from .servers import GIB, Misdeed, StandIn, StandInComfy, StandInOllama, StandInVllm, die, drip, flood, hang

DOCS = Path(__file__).parents[3] / "docs/neighbours.md"
CARD = "0000:65:00.0"
MIB = 1 << 20
MISDEEDS: list[Misdeed] = [hang, drip, die, flood]


@dataclass
class Told:
    code: int
    out: str
    err: str

    def line(self, begins: str) -> str:
        rows = re.sub(r"\n +", " ", self.out).splitlines()
        return next(row for row in rows if row.startswith(begins))


@dataclass
class Site:
    """The room that tests ask for needs both models of Ollama: the first may be seen as free before the second goes.

    A card of 80 GiB, of which programs that nobody can ask hold `others`, and servers with a part of the rest."""

    folder: Path
    servers: list[StandIn] = field(default_factory=list)
    others: int = 10 * GIB
    answer_s: str = "20s"
    daemon: Daemon = field(init=False)

    def __post_init__(self) -> None:
        self.card = FakeCard(self.folder / "cards", CARD, 80 * GIB)
        self.card.occupy(self.others)
        every = {"gauges_sample_s": "20ms", "gauges_sample_pressed_s": "20ms"}
        self.daemon = Daemon(gauges_device="file", gauges_host="none", gauges_file=self.card.gauge_file, **every)
        self.daemon.constants = {"tensord.daemon.governor.rooms.SETTLE_S": 0.5}

    def start(self, *servers: StandIn, **flags: object) -> None:
        """The daemon knows these servers, in this order."""
        if servers:
            self.daemon.flags["neighbours_servers"] = ", ".join(server.url for server in servers)
        self.daemon.flags |= {"neighbours_answer_s": self.answer_s, **flags}
        self.daemon.start()
        self.daemon.until(lambda status: status["governor"]["gauges"], "the first sample")

    def room(self, *words: str, code: int = 0) -> Told:
        command = [sys.executable, "-m", "tensord.client.ctl", "--socket", str(self.daemon.socket), "room", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        told = Told(done.returncode, done.stdout, done.stderr)
        assert told.code == code and "Traceback" not in told.err, told
        return told

    def reserved_bytes(self) -> int:
        return sum(row["reserved_bytes"] for row in self.daemon.status()["governor"]["devices"])


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    with made.daemon:
        yield made


def test_neighbours_give_memory_back_in_order_until_there_is_room_and_the_room_is_held(site: Site) -> None:
    vllm, ollama = StandInVllm(site.card, 40 * GIB), StandInOllama(site.card, 20 * GIB)
    comfy = StandInComfy(site.card, 9 * GIB)
    with vllm, ollama, comfy:
        vllm.running = 2
        site.start(vllm, ollama, comfy)
        told = site.room("20GiB", "--card", "0", "--for", "10m")
        assert told.line(CARD).split(maxsplit=1)[1] == "20.0 GiB are free, and held for 10m00s"
        assert told.line("cached tensors").endswith("freed nothing: no entry is cached on the card")
        assert told.line(vllm.name).endswith("left alone: 2 requests run or wait")
        assert told.line(ollama.name).endswith("freed 20.0 GiB")
        assert not comfy.requests, "there is room without it"
        with pytest.raises(DeviceFull):
            site.daemon.client().reserve_device(CARD, 2 * GIB, wait_s=0.0)
        assert not comfy.requests
        assert site.room("0").out == f"{CARD}: 1 room ended\n"
        until(lambda: not site.reserved_bytes(), "the reading after the end")


def test_the_commands_and_the_configuration_of_the_documentation_work_as_printed(site: Site) -> None:
    text = DOCS.read_text()
    (line,) = re.findall(r'^servers = "(.*)"$', text, re.MULTILINE)
    servers = Config.load(["--neighbours-servers", line], {}).neighbours.servers
    assert servers is not None and [place.kind for place in servers] == ["vllm", "ollama", "comfyui"]
    (words,) = re.findall(r"^tensorctl room (.*)$", text, re.MULTILINE)
    site.start()
    assert "8.00 GiB are free" in site.room(*words.split()).out


def test_a_server_that_says_yes_and_frees_nothing_is_named_and_what_is_missing_is_said(site: Site) -> None:
    with StandInOllama(site.card, 60 * GIB) as ollama:
        ollama.frees = False
        site.start(ollama)
        told = site.room("30GiB", code=1)
        assert told.line(CARD).endswith("no room: 20.0 GiB of 30.0 GiB are missing")
        assert "the card's gauge did not fall" in told.line(ollama.name)
        assert not site.reserved_bytes()
        assert told.err.count("\n") == 1 and "and 10.0 GiB are free" in told.err and "--wait" in told.err


@pytest.mark.parametrize("act", MISDEEDS, ids=lambda act: act.__name__)
def test_a_server_that_misbehaves_costs_its_time_at_most_and_one_log_line_and_the_next_is_asked(
    site: Site, act: Misdeed
) -> None:
    """And the daemon answers meanwhile."""
    site.answer_s = "3s"
    with StandInComfy(site.card, 4 * GIB) as bad, StandInOllama(site.card, 40 * GIB) as good:
        bad.instead = lambda handler: act(handler, bad)
        site.start(bad, good)
        told: list[Told] = []
        asking = threading.Thread(target=lambda: told.append(site.room("55GiB")))
        asking.start()
        until(lambda: bad.requests, "the server to be asked")
        with site.daemon.client() as client:
            assert client.modes()[CARD].total_bytes == 80 * GIB
        asking.join()
        assert "FAILED" in told[0].line(bad.name) and told[0].line(good.name).endswith("freed 40.0 GiB")
        assert ("4.00 GiB came free" in told[0].line(bad.name)) == (act is die)
        assert site.daemon.log.count(bad.name) == 1, site.daemon.log


def test_no_server_is_asked_that_is_not_configured_and_a_reload_configures_it(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "tensord.toml"
    file.write_text("")
    with StandInOllama(site.card, 60 * GIB) as ollama:
        site.start(config=file)
        assert "neighbour" not in site.room("45GiB", code=1).out and not ollama.requests
        file.write_text(f'[neighbours]\nservers = ["{ollama.url} on {CARD}"]\n')
        os.kill(site.daemon.pid, signal.SIGHUP)
        until(lambda: "reload applied" in site.daemon.log, "the reload")
        assert site.room("45GiB").line(ollama.name).endswith("freed 60.0 GiB")


def test_a_stop_waits_for_no_server_that_hangs(site: Site) -> None:
    with StandInComfy(site.card, 60 * GIB) as comfy:
        comfy.instead = lambda handler: hang(handler, comfy)
        site.start(comfy)
        command = [sys.executable, "-m", "tensord.client.ctl", "--socket", str(site.daemon.socket), "room", "30GiB"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as asking:
            until(lambda: comfy.requests, "the server to be asked")
            assert site.daemon.terminate() == 0
            assert asking.wait() == 1


def test_room_comes_of_cached_tensors_first(site: Site) -> None:
    """An owner that is a real client frees its entry; no server is asked."""
    with StandInOllama(site.card, 20 * GIB) as ollama:
        site.start(ollama)
        client, vram = site.daemon.client(), FakeVram(FakeCard(site.card.folder, CARD))
        held = tensord.DeviceCache(client, vram)
        key = tensord.Namespace(model="m", revision="1", dtype="uint8", processor="p").key("encoder", "image", b"x")
        held.put(key, {"hidden": vram.upload(np.zeros(8 * MIB, np.uint8))}, wait=True)
        with client.reserve_device(CARD, 50 * GIB - 10 * MIB, for_s=50.0):
            told = site.room("4MiB")
        assert told.line("cached tensors").endswith("freed 8.00 MiB") and not ollama.requests
        held.close()
