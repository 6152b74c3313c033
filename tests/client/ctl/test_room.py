"""`room`: what its answer looks like, of answers that are written down, and of a daemon without neighbours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tensord.client.ctl.room import room_text
from tensord.client.ctl.tables import WIDTH
from tensord.ipc import messages

from ...daemon_process import Daemon
from .conftest import Ctl

CARD = "0000:65:00.0"
GIB = 1 << 30


def test_an_answer_says_who_freed_what_and_why_not_more() -> None:
    steps = [
        messages.RoomStep("cached tensors", "freed", 2 * GIB),
        messages.RoomStep("vllm 127.0.0.1:8000", "left alone", 0, "3 requests run or wait"),
        messages.RoomStep("ollama 127.0.0.1:11434", "failed", 1 * GIB, "the connection was closed"),
        messages.RoomStep("comfyui 127.0.0.1:8188", "nothing", 0, "x " * 100),
    ]
    lines = room_text(CARD, 8 * GIB, messages.RoomMade(1, False, 0.0, 5 * GIB, steps, "why")).splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines[:1]] == ["no room: 5.00 GiB of 8.00 GiB are missing"]
    assert lines[1].endswith("freed 2.00 GiB") and lines[2].endswith("left alone: 3 requests run or wait")
    assert "FAILED: the connection was closed; 1.00 GiB came free" in lines[3]
    assert "freed nothing: x" in " ".join(lines) and max(map(len, lines)) <= WIDTH
    made = room_text(CARD, 8 * GIB, messages.RoomMade(1, True, 600.0, 0, []))
    assert made.split(maxsplit=1)[1] == "8.00 GiB are free, and held for 10m00s"
    partly = messages.RoomStep("ollama 127.0.0.1:11434", "freed", 3 * GIB, "6 of 70 models stay on cards")
    assert room_text(CARD, 8 * GIB, messages.RoomMade(1, True, 600.0, 0, [partly])).endswith(
        "freed 3.00 GiB; 6 of 70 models stay on cards"
    )


def test_the_answer_as_json_and_the_exit_code_say_whether_there_is_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gauges = tmp_path / "gauges"
    gauges.write_text(f"{CARD} {75 * GIB} {80 * GIB}\n")
    every = {"gauges_sample_s": "20ms", "gauges_sample_pressed_s": "20ms"}
    with Daemon(gauges_device="file", gauges_host="none", gauges_file=gauges, **every) as daemon:
        daemon.start()
        daemon.until(lambda status: status["governor"]["gauges"], "the first sample")
        ctl = Ctl(capsys, daemon.socket)
        made = json.loads(ctl("room", "3GiB", "--json", "--for", "2h").out)
        assert made["made"] and made["lasts_s"] == 3600.0 and made["missing_bytes"] == 0
        told = ctl("room", "3GiB", "--json", code=1)
        assert json.loads(told.out)["missing_bytes"] == 1 * GIB and "(3.00 GiB more are reserved)" in told.err
        assert "no card is called" in ctl("room", "3GiB", "--card", "7", code=2).err
        assert ctl("room", "0").out == f"{CARD}: 1 room ended\n"
