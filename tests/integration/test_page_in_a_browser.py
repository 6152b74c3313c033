"""The page in a real Chromium, from a daemon that runs: what people see, also while the daemon is away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import numpy as np
import pytest

from ..browser import Browser, Tab, needs_chromium
from ..client.ctl import documents
from ..daemon_process import Daemon, until
from ..ports import Port

pytestmark = needs_chromium
HOSTILE: Final = "<img src=x onerror=alert(1)>"
SAYS: Final = "document.getElementById('says').textContent"
SHOWN: Final = f"{SAYS} === '' && document.getElementById('daemon').textContent"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@pytest.fixture
def serving() -> Iterator[Daemon]:
    with Port() as port, Daemon(http=f"127.0.0.1:{port.number}") as running:
        yield running.start()


@pytest.fixture
def tab(browser: Browser, serving: Daemon) -> Tab:
    opened = browser.open(url_of(serving))
    opened.until(SHOWN, "the first figures")
    return opened


def url_of(daemon: Daemon) -> str:
    return f"http://{daemon.flags['http']}/"


def rows(tab: Tab, section: str) -> list[list[str]]:
    found: list[list[str]] = tab.run(
        f"[...document.querySelectorAll('#{section} tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return found


def facts(tab: Tab, section: str) -> dict[str, str]:
    found: dict[str, str] = tab.run(
        f"Object.fromEntries([...document.querySelectorAll('#{section} dl > div')]"
        ".map(each => [...each.children].map(part => part.textContent)))"
    )
    return found


def test_the_page_shows_the_daemon_s_figures_as_they_change_and_says_no_error(tab: Tab, serving: Daemon) -> None:
    assert facts(tab, "ring")["entries"] == "0"
    client = serving.client(name="engine")
    for number in range(3):
        client.put(bytes([number]) * 32, np.zeros(5000, np.uint8), tokens=5, wait=True)
    client.get(bytes(32))
    tab.until("[...document.querySelectorAll('#ring dd')].some(each => each.textContent === '15')", "15 tokens")
    assert facts(tab, "ring")["entries"] == "3"
    assert rows(tab, "gauges")[0][0] == "host"
    assert rows(tab, "gauges")[0][4] in ("relaxed", "normal", "pressure", "critical", "emergency")
    assert [row[1] for row in rows(tab, "clients")] == ["engine"]
    assert tab.run("document.title") == f"tensord {serving.instance}"
    assert tab.faults == []


def test_a_name_that_is_html_is_shown_as_text(tab: Tab, serving: Daemon) -> None:
    with serving.client(name=HOSTILE):
        tab.until("document.querySelector('#clients tbody td')", "the client")
        assert [row[1] for row in rows(tab, "clients")] == [HOSTILE]
        assert tab.run("document.images.length") == 0
    assert tab.faults == []


def test_while_the_daemon_is_away_the_page_says_so_and_goes_on_when_it_is_back(tab: Tab, serving: Daemon) -> None:
    shown = tab.run("document.getElementById('daemon').textContent")
    assert f"pid {serving.pid}," in shown
    for end in (serving.terminate, serving.kill):
        end()
        tab.until(f"{SAYS}.startsWith('The daemon cannot be reached')", "the end of the daemon")
        assert "The figures below are those of " in tab.run(SAYS)
        assert tab.run("document.body.className") == "old"
        assert tab.run("document.getElementById('daemon').textContent").split(":")[0] == shown.split(":")[0]
        serving.start()
        tab.until(f"{SHOWN}.includes('pid {serving.pid},')", "the next daemon")
        assert tab.run("document.body.className") == ""


def test_a_daemon_that_hangs_is_named_after_five_seconds(tab: Tab, serving: Daemon) -> None:
    serving.pause()
    tab.until(f"{SAYS}.startsWith('The daemon did not answer within 5 s.')", "the message")
    serving.resume()
    tab.until(SHOWN, "newer figures")


def test_a_daemon_of_another_version_gets_its_own_page(tab: Tab) -> None:
    tab.run("window.former = true; last.status.version = '0.0.0'")
    tab.until("window.former === undefined", "the page of the other version")
    tab.until(SHOWN, "its figures")


def test_what_an_operator_must_look_at_is_said_in_words(tab: Tab) -> None:
    """Figures that are written down, shown by the page of a daemon that has none of these troubles."""
    card = documents.gauge(documents.CARD, 79 * documents.GIB, 80 * documents.GIB, "emergency", source="file")
    stale = documents.gauge("host", 9, 10, "critical", stale=True, age_s=75.0, baseline_bytes=2048)
    governor = documents.governor(
        gauges=[card, stale],
        sources=[documents.source("nvidia", state="hangs", why="a call has not returned", problem=True)],
        devices=[documents.device(documents.CARD, stuck="engine-1 holds 3 GiB")],
        owners=[documents.owner(1, unresponsive=True)],
    )
    told = {
        "unix_s": 100.0,
        "status": documents.status(governor=governor),
        "problems": ["found_corrupt is 1 and must be 0"],
        "clients": [documents.client(1), documents.client(None)],
    }
    tab.run(f"clearTimeout(timer); asking = true; show({json.dumps(told)}, null)")
    assert rows(tab, "problems") == [["found_corrupt is 1 and must be 0"]]
    made_up, read, source = rows(tab, "gauges")
    assert made_up[2:5] == ["98.8 %", "79.0 GiB", "emergency"]
    assert made_up[-1] == "read from a FILE; REFUSES new entries"
    assert read[-1] == "STALE: cannot be read, its value of 1m15s ago is used; beside a baseline of 2.00 KiB"
    assert source[0] == "source" and source[-1] == "nvidia: hangs for 5m00s. a call has not returned"
    assert rows(tab, "devices")[0][-2:] == ["35 of 41.0k blocks", "STUCK: engine-1 holds 3 GiB"]
    assert [row[-1] for row in rows(tab, "clients")] == ["NOT ANSWERING", "orphaned"]
    assert tab.run("document.querySelectorAll('.alarm').length") >= 5
    assert tab.run("document.querySelector('#gauges .bar i').style.width") == "98.75%"
    # Trouble that is over leaves no trace.
    tab.run("asking = false; ask()")
    tab.until(f"{SHOWN} && document.querySelectorAll('.alarm').length === 1", "the daemon's own figures")
    assert tab.run("document.getElementById('problems').hidden")
    assert tab.faults == []


def test_another_site_can_neither_read_the_figures_nor_frame_the_page(browser: Browser, serving: Daemon) -> None:
    tab = browser.open()
    url = url_of(serving)
    assert tab.run(f"fetch('{url}page.json').then(answer => answer.text(), () => 'refused')") == "refused"
    tab.run(
        "new Promise(loaded => document.body.append(Object.assign(document.createElement('iframe'), "
        f"{{src: '{url}', onload: loaded}})))"
    )
    until(lambda: "frame-ancestors" in str(tab.faults), "the refusal of the frame")
