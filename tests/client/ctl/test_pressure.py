"""What `status` says of gauges, devices and their owners, of documents that are written down."""

from __future__ import annotations

from typing import Any

from tensord.client.ctl import status
from tensord.client.ctl.tables import WIDTH

from . import documents
from .documents import CARD, GIB, OTHER


def lines(**governor: Any) -> list[str]:
    return status.text(documents.status(governor=documents.governor(**governor))).splitlines()


def line(begins: str, has: str, **governor: Any) -> str:
    return next(line for line in lines(**governor) if line.startswith(begins) and has in line)


def test_a_gauge_is_shown_with_its_mode_share_and_source() -> None:
    assert line("gauge", CARD).split(maxsplit=1)[1] == (
        f"{CARD}: pressure for 3m12s, 87.5 % of 80.0 GiB; from nvidia, read 1s ago"
    )


def test_a_gauge_is_shown_with_its_baseline() -> None:
    gauge = {**documents.gauge(CARD, 1, 4, "relaxed"), "baseline_bytes": 72 * GIB, "baseline": "declared"}
    text = " ".join(word for line in lines(gauges=[gauge]) for word in line.split())
    assert "beside a declared baseline of 72.0 GiB; from nvidia" in text


def test_made_up_readings_are_said_to_be() -> None:
    assert "a DRILL: made-up readings" in line("gauge", OTHER)
    assert any("REFUSES new entries" in line for line in lines())
    of_file = [documents.gauge("host", 1, 2, "normal", source="file")]
    assert "from a FILE, and no measurement" in line("gauge", "host", gauges=of_file)


def test_a_gauge_that_cannot_be_read_is_said_to_be_stale() -> None:
    assert "STALE" in line("gauge", CARD, gauges=[documents.gauge(CARD, 1, 2, "normal", stale=True)])


def test_a_source_that_hangs_is_said_to_with_since_when() -> None:
    hanging = documents.source("nvidia", state="hanging", since_s=65.0, why="no answer for 65 s", problem=True)
    assert "nvidia hanging for 1m05s: no answer for 65 s" in line("SOURCE", "nvidia", sources=[hanging])
    assert not any("SOURCE" in line for line in lines())


def test_every_process_on_a_card_is_shown_clients_or_not() -> None:
    assert line("process", "5001").split(maxsplit=1)[1] == f"{CARD}: pid 5001 (python3), 40.0 GiB, client 1"
    assert line("process", "pid 77 ").split(maxsplit=1)[1] == f"{CARD}: pid 77 (python3), 20.0 GiB, no client"


def test_a_process_of_another_pid_namespace_is_said_to_be_unknown() -> None:
    unseen = {**documents.process(9, 1), "name": None, "bytes": None, "seen": False}
    gauge = {**documents.gauge(CARD, 1, 2, "normal"), "processes": [unseen]}
    assert "pid 9 (unknown), bytes unknown, unknown whether a client" in line("process", "pid 9", gauges=[gauge])
    hidden = {**documents.gauge(CARD, 1, 2, "normal"), "processes": [{**unseen, "seen": True}]}
    assert "pid 9 (unknown), bytes unknown, no client" in line("process", "pid 9", gauges=[hidden])


def test_without_gauges_that_is_said() -> None:
    assert line("gauges", "is unknown", gauges=[], devices=[])


def test_a_device_is_shown_with_what_is_going_and_what_stays() -> None:
    assert line("device", CARD).split(maxsplit=1)[1].startswith(f"{CARD}: 300 entries of 2 clients, 6.00 GiB, tokens 3")
    text = " ".join(word for line in lines() for word in line.split())
    assert "leaving 12 (240 MiB); reserved 1.00 GiB; floor 35 of 40,960 blocks" in text
    assert "registered 500: offloaded 120, dropped 40, released 30, removed with their owner 10" in text
    assert "refused UnderPressure 6" in text
    assert "w: client 1, at step 2; 6 steps of 4 agents" in text


def test_stuck_devices_and_unresponsive_owners_are_named() -> None:
    quiet = lines()
    assert not any(line.startswith(("STUCK", "NO ANSWER")) for line in quiet)
    assert line("STUCK", "lowered nothing", devices=[documents.device(CARD, stuck="a pass lowered nothing")])
    owner = documents.owner(7, unresponsive=True)
    assert "client 7 (engine-7, pid 5007)" in line("NO ANSWER", CARD, owners=[owner])


def test_a_ring_that_shrank_is_shown() -> None:
    host = {"resident_bytes": 3 * GIB, "wanted_bytes": 5 * GIB, "resident_bytes_max": 3 * GIB}
    assert "3.00 GiB of 5.00 GiB in memory" in line("ring", "under pressure", host=host)


def test_any_names_and_figures_fit_100_columns() -> None:
    huge = {figure: 10**15 for figure, value in documents.device(CARD).items() if type(value) is int}
    shown = lines(
        gauges=[documents.gauge("g\x1b" * 32, 10**15, 1, "workflow_aware", stale=True, source="drill")],
        devices=[documents.device("d" * 64, **huge, stuck="why " * 60)],
        owners=[documents.owner(10**9, name="n" * 60, unresponsive=True)],
    )
    assert max(map(len, shown)) <= WIDTH
    assert not any("\x1b" in line for line in shown)


def test_a_neighbour_is_shown_with_what_it_did_when_it_was_asked_last() -> None:
    failed: dict[str, Any] = {"outcome": "failed", "why": "no answer within 20 s", "since_s": 65.0}
    asked = documents.neighbour("ollama 127.0.0.1:11434", card=CARD, **failed)
    assert line("neighbour", "ollama", neighbours=[asked]).split(maxsplit=1)[1] == (
        f"ollama 127.0.0.1:11434 on {CARD}: failed, 1m05s ago: no answer within 20 s"
    )
    never = {**asked, "card": None, "outcome": "never asked", "why": "", "since_s": None, "asking": True}
    assert line("neighbour", "ollama", neighbours=[never]).endswith("11434: is being asked; before: never asked")
    freed = {**asked, "card": None, "outcome": "freed", "why": "", "freed_bytes": 6 * GIB}
    assert line("neighbour", "ollama", neighbours=[freed]).endswith("11434: freed, 6.00 GiB, 1m05s ago")
