from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tensord.client.ctl.frame import ASCII, BLOCKS, bar, frame
from tensord.errors import VersionMismatch

from . import documents
from .documents import CARD, OTHER

NOW = 1_700_000_100.0
HUGE = 10**15


def drawn(
    status: dict[str, Any] | None = None,
    clients: list[dict[str, Any]] | None = None,
    entries: list[dict[str, Any]] | None = None,
    width: int = 100,
    **more: Any,
) -> list[str]:
    """The picture as a terminal without colours shows it, line by line."""
    picture = frame(status or documents.status(), clients or [], entries or [], width, now_unix_s=NOW, **more)
    out = io.StringIO()
    Console(file=out, width=1000, color_system=None).print(picture)
    return out.getvalue().splitlines()


def line_of(lines: list[str], begins: str) -> str:
    return next(line for line in lines if line.split()[:1] == [begins])


def test_a_gauge_is_a_bar_with_its_mode() -> None:
    line = line_of(drawn(), CARD)
    assert "87.5 %" in line
    assert "70.0 GiB" in line
    assert line.split()[-2:] == ["pressure", "3m12s"]


def test_a_bar_is_filled_up_to_the_share_and_marked_where_modes_begin() -> None:
    assert bar(0.5, [0.7, 0.85], 20, "").plain == "█" * 10 + "░" * 4 + "┃" + "░" * 2 + "┃" + "░" * 2
    assert bar(0.0, [], 4, "").plain == "░" * 4
    assert bar(1.7, [1.0], 4, "", ASCII).plain == "###|"


@settings(max_examples=50)
@given(st.floats(0, 3), st.lists(st.floats(0, 1), max_size=4), st.integers(1, 200))
def test_a_bar_has_its_width(used_share: float, thresholds: list[float], width: int) -> None:
    assert len(bar(used_share, thresholds, width, "").plain) == width


def test_a_baseline_is_shown_under_its_gauge() -> None:
    gauge = {**documents.gauge(CARD, 1, 4, "relaxed"), "baseline_bytes": 72 << 30, "baseline": "learned"}
    lines = drawn(documents.status(governor=documents.governor(gauges=[gauge])), [])
    assert any("beside a learned baseline of 72.0 GiB" in line for line in lines)


def test_drilled_stale_stuck_refusing_and_silent_parts_are_highlighted() -> None:
    quiet = documents.governor(gauges=[documents.gauge("host", 1, 4, "relaxed")])
    client = [documents.client(2)]
    words = ("DRILL", "FILE", "STALE", "REFUSES", "STUCK", "NOT ANSWERING", "hanging")
    assert not any(word in "\n".join(drawn(documents.status(governor=quiet), client)) for word in words)
    loud = documents.governor(
        gauges=[
            documents.gauge("host", 1, 4, "relaxed", source="file"),
            documents.gauge(CARD, 1, 4, "relaxed", stale=True),
            documents.gauge(OTHER, 4, 4, "emergency", source="drill"),
        ],
        sources=[documents.source("nvidia", state="hanging", why="no answer for 9 s", problem=True)],
        devices=[documents.device(CARD, stuck="a pass lowered nothing")],
        owners=[documents.owner(2, unresponsive=True)],
    )
    lines = drawn(documents.status(governor=loud), client)
    assert all(any(word in line for line in lines) for word in words)
    assert any("STUCK: a pass lowered nothing" in line for line in lines)


def test_the_most_used_entries_come_first_and_how_many_were_looked_at_is_said() -> None:
    lines = drawn(entries=[documents.entry(number) for number in (5, 90, 7)])
    at = next(number for number, line in enumerate(lines) if line.startswith("USES"))
    assert [line.split()[0] for line in lines[at + 1 : at + 4]] == ["90", "7", "5"]
    assert lines[at + 4] == "3 of 640 entries were examined"
    assert not any("examined" in line for line in drawn(documents.status(store=documents.store(entries=0))))


def test_owners_that_do_not_answer_come_first() -> None:
    governor = documents.governor(owners=[documents.owner(1), documents.owner(2, bytes=1, unresponsive=True)])
    lines = drawn(documents.status(governor=governor), [documents.client(n) for n in (1, 2, 3)])
    at = next(number for number, line in enumerate(lines) if line.startswith("CLIENT"))
    assert [line.split()[0] for line in lines[at + 1 : at + 4]] == ["2", "1", "3"]


def test_the_processes_with_the_most_bytes_on_cards_come_first_clients_or_not() -> None:
    lines = drawn()
    at = next(number for number, line in enumerate(lines) if line.startswith("CARD"))
    assert [line.split()[1:] for line in lines[at + 1 : at + 3]] == [
        ["5001", "python3", "40.0", "GiB", "1"],
        ["77", "python3", "20.0", "GiB", "no"],
    ]
    bare = documents.governor(gauges=[documents.gauge("host", 1, 4, "relaxed")])
    assert not any(line.startswith("CARD") for line in drawn(documents.status(governor=bare)))


def test_neighbours_come_with_what_they_did_when_they_were_asked_last() -> None:
    neighbours = [
        documents.neighbour("ollama 127.0.0.1:11434", outcome="freed", freed_bytes=6 << 30, since_s=65.0),
        documents.neighbour("comfyui 127.0.0.1:8188", card=CARD, asking=True),
    ]
    lines = drawn(documents.status(governor=documents.governor(neighbours=neighbours)))
    at = next(number for number, line in enumerate(lines) if line.startswith("NEIGHBOUR"))
    assert lines[at + 1].split() == ["ollama", "127.0.0.1:11434", "any", "freed,", "6.00", "GiB,", "1m05s", "ago"]
    assert lines[at + 2].split(maxsplit=2)[2] == f"{CARD}  is being asked; before: never asked"
    assert not any(line.startswith("NEIGHBOUR") for line in drawn())


def test_the_last_transition_comes_first() -> None:
    lines = drawn()
    at = next(number for number, line in enumerate(lines) if line.startswith("TRANSITION"))
    assert lines[at + 1].startswith("40s ago")
    assert "normal -> pressure" in lines[at + 1]
    assert lines[at + 2].startswith("1m40s ago")


def test_rates_are_of_the_time_between_two_documents() -> None:
    before = documents.status(uptime_s=5023.5, store=documents.store(hits=8000, misses=990))
    assert line_of(drawn(before=before), "now").startswith("now     lookups 505/s")
    assert "hits 99.0 %" in line_of(drawn(before=before), "now")
    # Another incarnation's counters began anew.
    assert line_of(drawn(before={**before, "epoch": 2}), "now").split() == ["now", "-"]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_any_figures_and_names_fit(width: int) -> None:
    name = "n" * 128
    huge = {figure: HUGE for figure, value in documents.store().items() if type(value) is int}
    row = {figure: HUGE for figure, value in documents.device(name).items() if type(value) is int}
    governor = documents.governor(
        gauges=[
            {
                **documents.gauge(name, HUGE, 1, "workflow_aware", stale=True, source="drill", since_s=1e9),
                "processes": [documents.process(HUGE, HUGE, HUGE, name)],
            }
        ],
        devices=[documents.device(name, **row, stuck="why " * 50)],
        owners=[documents.owner(HUGE, bytes=HUGE, unresponsive=True)],
        neighbours=[documents.neighbour(name, card=name, why="why " * 70, freed_bytes=HUGE)],
    )
    status = documents.status(instance=name, governor=governor, store=documents.store(**huge))
    lines = drawn(status, [documents.client(HUGE, name=name)], [documents.entry(1, uses=HUGE)], width)
    assert max(map(len, lines)) <= width


def test_a_crowd_fits_the_rows_that_there_are() -> None:
    clients = [documents.client(number) for number in range(500)]
    entries = [documents.entry(number) for number in range(500)]
    rows = [documents.process(number, 1) for number in range(64)]
    gauge = {**documents.gauge(CARD, 1, 2, "normal"), "processes": rows}
    neighbours = [documents.neighbour(f"ollama 127.0.0.1:{number}") for number in range(50)]
    status = documents.status(governor=documents.governor(gauges=[gauge], neighbours=neighbours))
    for height in (30, 50, 100):
        lines = drawn(status, clients, entries, height=height)
        assert len(lines) <= height
        assert any(line.startswith("and 4") and line.endswith("more") for line in lines)
        assert any(line.startswith("NEIGHBOUR") for line in lines) == (height > 30)


def test_names_are_neither_markup_nor_commands_to_the_terminal() -> None:
    client = documents.client(1, name="[red]\x1b[2Jx\n")
    gauge = documents.gauge("\x1b[H\nhost", 1, 2, "normal")
    lines = drawn(documents.status(governor=documents.governor(gauges=[gauge])), [client])
    assert "[red]?[2Jx?" in line_of(lines, "1")
    assert not any("\x1b" in line for line in lines)


def test_where_only_ascii_is_to_be_had_there_is_nothing_else() -> None:
    assert "".join(drawn(glyphs=ASCII)).isascii()
    assert any(BLOCKS[0] in line for line in drawn())


def test_the_screen_says_that_a_daemon_has_no_gauges() -> None:
    bare = documents.governor(gauges=[], devices=[], owners=[], transitions=[])
    assert any("no gauge" in line for line in drawn(documents.status(governor=bare)))


def test_a_document_of_another_version_is_told_so() -> None:
    status = documents.status()
    del status["governor"]
    with pytest.raises(VersionMismatch, match="governor"):
        drawn(status)
