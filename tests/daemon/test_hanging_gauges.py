"""A daemon whose GPU library hangs: where it hangs, how that ends, and what else happens meanwhile.

The library is the stand-in NVML of the tests of gauges, under the real nvidia-ml-py. It really does not return.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import tensord
from tensord.errors import NoGauge
from tensord.ipc.messages import control as messages

from ..daemon_process import Daemon, until
from .gauges.cards import GIB, Card, Cards, Hang, compiled

FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"
DEADLINE_S = 0.3
FROM_THE_START = ("open", "address 1")


def preload(library: str) -> None:
    """Runs in the daemon's process before it begins: nvidia-ml-py then finds this library by its name."""
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("nvml.c", tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1")


class Site:
    """A daemon, its host's memory as a file says it is, two cards, and the library's hanging."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.cards = Cards(folder / "cards", [Card(10 * GIB, bus=1), Card(20 * GIB, bus=2)])
        self.hang = Hang(folder / "hang")
        self._file = folder / "gauges"
        self.host("6GiB")
        self.cards.show()
        self.daemon = Daemon(
            gauges_device="nvidia",
            gauges_host="file",
            gauges_file=self._file,
            gauges_sample_s="20ms",
            gauges_sample_pressed_s="20ms",
        )
        self.daemon.before = (f"{__name__}:preload", {"library": str(library)})
        self.daemon.constants = {
            "tensord.daemon.gauges.gauges.DEADLINE_S": DEADLINE_S,
            "tensord.daemon.gauges.gauges.STALE_S": 2 * DEADLINE_S,
        }

    def host(self, used: str) -> None:
        beside = self._file.with_suffix(".new")
        beside.write_text(f"host {used} 64GiB\n")
        beside.rename(self._file)

    def gauges(self) -> dict[str, dict[str, Any]]:
        return {row["gauge"]: row for row in self.daemon.status()["governor"]["gauges"]}

    def source(self, name: str = "nvidia") -> dict[str, Any]:
        rows = self.daemon.status()["governor"]["sources"]
        return next((row for row in rows if row["source"] == name), {"state": "not sampled yet"})

    def problems(self) -> str:
        return "\n".join(self.daemon.ask(messages.HealthQuery)["problems"])

    def until_state(self, state: str) -> dict[str, Any]:
        return until(lambda: row if (row := self.source())["state"] == state else {}, f"the source to be {state}")

    def until_read(self, used_bytes: int) -> None:
        """Every card is read anew, and shows this."""

        def shown() -> bool:
            rows = self.gauges()
            return all(name in rows and not rows[name]["stale"] for name in (FIRST, SECOND)) and (
                rows[FIRST]["used_bytes"] == used_bytes
            )

        until(shown, "both cards to be read")

    def until_hanging(self) -> None:
        self.hang.until_there()
        row = self.until_state("hanging")
        assert row["problem"] and row["since_s"] > DEADLINE_S
        assert "gauge source nvidia hangs for" in self.problems()


@pytest.fixture
def site(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("STANDIN_CARDS", str(tmp_path / "cards"))
    monkeypatch.setenv("STANDIN_HANG", str(tmp_path / "hang"))
    made = Site(tmp_path, library)
    with made.daemon:
        yield made
        made.hang.end()


def begin(site: Site, point: str) -> None:
    """The daemon runs, and the library hangs there."""
    if point in FROM_THE_START:
        site.hang.begin(point)
        site.daemon.start()
    else:
        site.daemon.start()
        site.until_read(10 * GIB)
        site.hang.begin(point)
    site.until_hanging()


def restart(site: Site) -> None:
    assert site.daemon.terminate() == 0
    site.daemon.start()
    site.until_hanging()


def kill(site: Site) -> None:
    site.daemon.kill()
    site.daemon.start()
    site.until_hanging()


def reserves(client: tensord.Client) -> bool:
    """Whether the first card has room. On a busy machine its gauge may be late once more."""
    with suppress(NoGauge), client.reserve_device(FIRST, GIB):
        return True
    return False


TABLE: dict[str, Callable[[Site], None]] = {
    "open": lambda site: None,
    "address 1": kill,
    "count": restart,
    "read 1": kill,
}
"""What disturbs the daemon while the library hangs there."""


@pytest.mark.parametrize("point", TABLE)
def test_a_library_that_hangs_leaves_the_rest_alone_and_is_read_again_once_it_answers(site: Site, point: str) -> None:
    begin(site, point)
    TABLE[point](site)
    site.host("63.9GiB")

    def host_goes_on() -> dict[str, dict[str, Any]]:
        rows = site.gauges()
        host = rows.get("host", {"stale": True})
        cards_are_stale = all(rows[name]["stale"] for name in rows.keys() - {"host"})
        return rows if cards_are_stale and not host["stale"] and host["mode"] == "emergency" else {}

    until(host_goes_on, "the host's own gauge to go on")
    with pytest.raises(NoGauge, match=r"has no gauge|cannot be read \(nvidia: no answer for"):
        site.daemon.client().reserve_device(FIRST, GIB)
    site.cards.cards[0].used_bytes = 11 * GIB
    site.cards.show()
    site.hang.end()
    site.until_read(11 * GIB)
    until(lambda: not site.problems(), "health to be well again")
    client = site.daemon.client()
    until(lambda: reserves(client), "a reservation")
    assert site.daemon.terminate() == 0


def test_a_library_that_hangs_is_reported_before_the_next_sample(site: Site) -> None:
    site.daemon.flags["gauges_sample_s"] = "1h"
    begin(site, "open")


@pytest.mark.parametrize("point", [*TABLE, "shut", "exit"])
def test_a_stop_waits_for_no_library_that_hangs_for_ever(site: Site, point: str) -> None:
    """Nor for one that hangs as it is closed, or in a destructor."""
    if point == "shut":
        site.daemon.start()
        site.until_read(10 * GIB)
        site.hang.begin("shut")
    else:
        begin(site, "read 0" if point == "exit" else point)
    if point == "exit":
        site.hang.begin("read 0", "exit")
    assert site.daemon.terminate() == 0
    assert point == "shut" or "gauge sources hang, and are left behind" in site.daemon.log
