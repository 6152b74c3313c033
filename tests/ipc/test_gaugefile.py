"""What may stand in a gauge file, and what is said of a line that may not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.errors import BadGaugeFile
from tensord.ipc.gaugefile import FILE_CHARS_MAX, read_gauges
from tensord.ipc.messages.governance import GAUGES_MAX
from tensord.ipc.messages.schema import SIZE_BYTES_MAX

GIB = 1 << 30
CARD = "0000:65:00.0"


def test_gauges_are_read_by_name_with_sizes_and_shares() -> None:
    text = f"# NAME USED TOTAL\n\nhost 12GiB\t64GiB\r\n  {CARD}   87.5% 80GiB  # the card\nfull 100% 1000\nempty 0 1\n"
    assert read_gauges(text) == {
        "host": (12 * GIB, 64 * GIB),
        CARD: (70 * GIB, 80 * GIB),
        "full": (1000, 1000),
        "empty": (0, 1),
    }
    assert list(read_gauges(text)) == ["host", CARD, "full", "empty"]


def test_a_driver_may_show_more_used_than_there_is_up_to_twice() -> None:
    assert read_gauges("card 200 100\nother 150% 100") == {"card": (200, 100), "other": (150, 100)}
    for used in ("201", "200.9%", "1GiB"):
        with pytest.raises(BadGaugeFile, match=rf"line 1: USED = '{used}'; wanted: 200 bytes at most"):
            read_gauges(f"card {used} 100")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("host nan 64GiB", "USED = 'nan'; wanted: a size in bytes such as 4GiB"),
        ("host inf 64GiB", "USED = 'inf'; wanted"),
        ("host nan% 64GiB", "USED = 'nan%'; wanted"),
        ("host -1 64GiB", "USED = '-1'; wanted"),
        ("host -5% 64GiB", "USED = '-5%'; wanted: .* or a share of TOTAL such as 75%"),
        ("host 0.97 64GiB", "USED = '0.97'; wanted: .* or a share of TOTAL such as 75%; a share of 0.97 is 97%"),
        ("host 1.0 64GiB", "USED = '1.0'; wanted: .*; a share of 1.0 is 100%"),
        ("host 0 64.5", "TOTAL = '64.5'; wanted: a size"),
        ("host 1e9 64GiB", "USED = '1e9'; wanted"),
        ("host 5XB 64GiB", "USED = '5XB'; wanted"),
        ("host 0 0", "TOTAL = '0'; wanted: from 1 to 281474976710656 bytes"),
        ("host 50% 0", "TOTAL = '0'; wanted: from 1 to"),
        ("host 0 -64GiB", "TOTAL = '-64GiB'; wanted: a size"),
        ("host 0 75%", "TOTAL = '75%'; wanted: a size"),
        ("host 0 NaN", "TOTAL = 'NaN'; wanted: a size"),
        ("host 0 1024TiB", "TOTAL = '1024TiB'; wanted: from 1 to"),
        (f"host 0 {'9' * 300}", "TOTAL = '9{64}'…; wanted: from 1 to"),
        (f"host 0 {'9' * 400}.5GiB", "TOTAL = '9{64}'…; wanted: a size"),
        (f"{'n' * 65} 0 1", "NAME = 'n{64}'…; wanted: a gauge's name: printable, 64 characters"),
        ("ho\x1bst 0 1", r"NAME = 'ho\\x1bst'; wanted"),
    ],
)
def test_a_line_that_is_no_reading_is_named_with_field_value_and_what_is_wanted(line: str, said: str) -> None:
    with pytest.raises(BadGaugeFile, match=f"^line 2: {said}"):
        read_gauges(f"card 1 2\n{line}")


@pytest.mark.parametrize("line", ["host 12GiB", "host 12 GiB 64 GiB", '{"host": 1}', "host", "0 " * 100])
def test_a_line_has_as_many_fields_as_are_named(line: str) -> None:
    with pytest.raises(BadGaugeFile, match=r"^line 2: '.* has \d+ fields; wanted: NAME USED TOTAL"):
        read_gauges(f"card 1 2\n{line}")


def test_a_gauge_stands_in_one_line_only() -> None:
    with pytest.raises(BadGaugeFile, match="line 3: NAME = 'host'; wanted: a gauge that no earlier line has"):
        read_gauges("host 1 2\ncard 1 2\nhost 1 2")


def test_a_file_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(BadGaugeFile, match="more than 1048576 characters"):
        read_gauges("#" * (FILE_CHARS_MAX + 1))
    assert len(read_gauges("".join(f"g{n} 1 2\n" for n in range(GAUGES_MAX)))) == GAUGES_MAX
    with pytest.raises(BadGaugeFile, match=f"line {GAUGES_MAX + 1}: more than {GAUGES_MAX} readings"):
        read_gauges("".join(f"g{n} 1 2\n" for n in range(GAUGES_MAX + 1)))


lines = st.lists(
    st.one_of(
        st.text(max_size=30),
        st.lists(st.sampled_from(["host", "0", "1", "75%", "4GiB", "-1", "nan", "1.5", "#", "9" * 50]), max_size=5).map(
            " ".join
        ),
    ),
    max_size=6,
).map("\n".join)


@given(lines)
def test_any_text_is_read_or_refused_and_what_is_read_fits_the_wire(text: str) -> None:
    try:
        gauges = list(read_gauges(text).items())
    except BadGaugeFile:
        gauges = []
    for name, (used_bytes, total_bytes) in gauges:
        assert 1 <= len(name) <= 64
        assert 1 <= total_bytes <= SIZE_BYTES_MAX
        assert 0 <= used_bytes <= min(2 * total_bytes, SIZE_BYTES_MAX)
