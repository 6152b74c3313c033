from __future__ import annotations

from pathlib import Path

import pytest

from tensord.daemon.gauges.reading import GaugeFailed, Reading
from tensord.daemon.gauges.sources.file import FileSource
from tensord.ipc.messages.modes import HOST_GAUGE, Tier

from .conformance import AnySource, Stage

GIB = 1 << 30
TEXT = "# a test\nhost 12GiB 64GiB\n\n0000:65:00.0 60GiB 80GiB\n0000:66:00.0 1GiB 80GiB  # another\n"


def test_each_line_of_the_tier_is_a_gauge(tmp_path: Path) -> None:
    file = tmp_path / "gauges"
    file.write_text(TEXT)
    cards = {"0000:65:00.0": Reading(60 * GIB, 80 * GIB), "0000:66:00.0": Reading(1 * GIB, 80 * GIB)}
    assert FileSource(file, Tier.DEVICE).read(0.0) == cards


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a 1GiB 2GiB\nb lots 2GiB\n", "line 2: 'lots' is not a size"),
        ("a 1GiB 2GiB\nb -1 2GiB\n", "line 2"),
        ("a 1 0\n", "line 1: impossible reading"),
        (f"a 1 {'9' * 400}\n", "line 1"),
        (f"{'n' * 65} 1 2\n", "line 1"),
        ("a\x1b 1 2\n", "line 1"),
        ("a 1 2\na 1 2\n", "line 2: 'a' is no name, stands there twice"),
        ("".join(f"g{n} 1 2\n" for n in range(1025)), "line 1025"),
        ("a 1GiB\n", "line 1"),
        ("", "no line for a device"),
        ("host 1GiB 2GiB\n", "no line for a device"),
    ],
)
def test_garbage_is_a_failure_that_names_file_line_and_field(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "gauges"
    file.write_text(text)
    with pytest.raises(GaugeFailed) as failed:
        FileSource(file, Tier.DEVICE).read(0.0)
    assert says in str(failed.value) and str(file) in str(failed.value)


def test_an_unreadable_path_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name, says in (("bytes", "UTF-8"), (".", "directory")):
        with pytest.raises(GaugeFailed, match=says):
            FileSource(tmp_path / name, Tier.DEVICE).read(0.0)


class Lines(Stage):
    def __init__(self, path: Path, tier: Tier) -> None:
        self.gauge = HOST_GAUGE if tier is Tier.HOST else "0000:65:00.0"
        self.source = FileSource(path, tier)
        self.path = path

    def show(self, used_bytes: int, total_bytes: int) -> None:
        self.path.write_text(f"{self.gauge} {used_bytes} {total_bytes}\n")

    def lose(self) -> None:
        self.path.unlink()


class TestDevices(AnySource):
    tier = Tier.DEVICE

    @pytest.fixture
    def set_up(self, tmp_path: Path) -> Stage:
        return Lines(tmp_path / "gauges", self.tier)


class TestHost(TestDevices):
    tier = Tier.HOST
