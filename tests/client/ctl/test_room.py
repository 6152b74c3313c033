"""`room`: room that is made on a card."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tensord.client.ctl.orders import room_text
from tensord.client.ctl.output import WIDTH
from tensord.ipc.messages import control as messages

from ...daemon_process import Daemon
from . import documents
from .conftest import Ctl
from .documents import CARD, GIB

CARDS = ["0000:65:00.0", "0000:66:00.0"]


@pytest.fixture
def carded(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with two cards of 80 GiB, of which the first uses 75."""
    gauges = tmp_path / "gauges"
    gauges.write_text(f"{CARDS[0]} {75 << 30} {80 << 30}\n{CARDS[1]} {10 << 30} {80 << 30}\n")
    every = {"gauges_sample_s": "20ms", "gauges_sample_pressed_s": "20ms"}
    with Daemon(gauges_device="file", gauges_host="none", gauges_file=gauges, **every) as daemon:
        daemon.start()
        daemon.until(lambda status: len(status["governor"]["gauges"]) == 2, "the first sample")
        yield daemon


def test_a_card_that_is_not_there_is_named(carded: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    ctl = Ctl(capsys, carded.socket)
    assert f"name one; the daemon's cards are {', '.join(CARDS)}" in ctl("room", "3GiB", code=2).err
    assert "no card is called '7'" in ctl("room", "3GiB", "--card", "7", code=2).err


def test_the_only_card_need_not_be_named_and_without_one_the_doctor_says_why(recorded: Callable[..., Ctl]) -> None:
    gauges = [documents.gauge("host", 1, 2, "normal")]
    none = recorded(StatusQuery=documents.status(governor=documents.governor(gauges=gauges)))
    assert "the daemon reads no card; `tensorctl doctor` says why" in none("room", "1GiB", code=1).err


def test_an_answer_says_who_freed_what_and_why_not_more() -> None:
    steps = [
        messages.RoomStep("cached tensors", "freed", 2 * GIB),
        messages.RoomStep("vllm 127.0.0.1:8000", "left alone", 0, "3 requests run or wait"),
        messages.RoomStep("ollama 127.0.0.1:11434", "failed", 1 * GIB, "the connection was closed"),
        messages.RoomStep("ollama 127.0.0.1:11435", "freed", 3 * GIB, "6 of 70 models stay on cards"),
        messages.RoomStep("comfyui 127.0.0.1:8188", "nothing", 0, "x " * 100),
    ]
    lines = room_text(CARD, 8 * GIB, messages.RoomMade(1, False, 0.0, 5 * GIB, steps, "why")).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert [line[24:] for line in lines[:5]] == [
        "no room: 5.00 GiB of 8.00 GiB are missing",
        "freed 2.00 GiB",
        "left alone: 3 requests run or wait",
        "FAILED: the connection was closed; 1.00 GiB came free",
        "freed 3.00 GiB; 6 of 70 models stay on cards",
    ]
    assert lines[5][24:].startswith("freed nothing: x")
    made = room_text(CARD, 8 * GIB, messages.RoomMade(1, True, 600.0, 0, []))
    assert made.split(maxsplit=1)[1] == "8.00 GiB are free, and held for 10m00s"


def test_the_answer_as_json_and_the_exit_code_say_whether_there_is_room(
    carded: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    ctl = Ctl(capsys, carded.socket)
    made = json.loads(ctl("room", "3GiB", "--card", "0", "--json", "--for", "2h").out)
    assert made["made"] and made["lasts_s"] == 3600.0 and made["missing_bytes"] == 0
    told = ctl("room", "3GiB", "--card", "0", "--json", code=1)
    assert json.loads(told.out)["missing_bytes"] == 1 * GIB and "(3.00 GiB more are reserved)" in told.err
    assert ctl("room", "0", "--card", "0").out == f"{CARDS[0]}: 1 room ended\n"
