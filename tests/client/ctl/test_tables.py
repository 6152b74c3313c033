from __future__ import annotations

import pytest

from tensord.client.ctl.tables import WIDTH, age, counted, counts, cut, pairs, share, short, size, table, wrapped


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (102_464, "100 KiB"),
        (64 << 20, "64.0 MiB"),
        (1288490188, "1.20 GiB"),
        (3 << 40, "3.00 TiB"),
    ],
)
def test_sizes_are_written_with_three_digits_or_so(value: int, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0s"),
        (0.0, "0s"),
        (0.0004, "<1 ms"),
        (0.04, "40 ms"),
        (0.9999, "999 ms"),
        (1.9, "1s"),
        (59, "59s"),
        (192, "3m12s"),
        (3600, "1h00m"),
        (90061, "1d01h"),
        (864000, "10d00h"),
        (1e9, "11574d"),
    ],
)
def test_ages_are_written_in_their_two_largest_units(seconds: float, text: str) -> None:
    assert age(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0 uses"), (1, "1 use"), (2, "2 uses"), (1000, "1,000 uses")])
def test_a_count_agrees_with_its_noun(value: int, text: str) -> None:
    assert counted(value, "use", "uses") == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (9999, "9999"), (12_345, "12.3k"), (999_949, "999.9k"), (999_950, "1.0M"), (10**12, "1.0T")],
)
def test_counts_in_columns_are_short(value: int, text: str) -> None:
    assert short(value) == text


def test_a_share_of_nothing_is_no_number() -> None:
    assert share(0, 0) == "-"
    assert share(1, 8) == "12.5 %"


def test_counts_leave_out_what_never_happened() -> None:
    assert counts({"ttl": 0, "explicit": 12345}) == "explicit 12,345"
    assert counts({}) == "none"


def test_columns_are_aligned_and_lines_have_no_trailing_blanks() -> None:
    lines = table(("NAME", "SIZE", "X"), [("a", "1", ""), ("longer", "1000", "y")], right=(1,)).split("\n")
    assert lines == ["NAME    SIZE  X", "a          1", "longer  1000  y"]


def test_a_client_s_name_cannot_move_the_cursor() -> None:
    assert "\x1b" not in table(("NAME",), [("\x1b[2Jgone\n",)])
    assert "\x1b" not in pairs([("name", "\x1b[2J")])
    assert table(("NAME",), [("\x1b[2Jgone\n",)]).count("\n") == 1


def test_long_texts_go_on_under_themselves() -> None:
    text = pairs([("name", "word " * 40), ("b", "short")])
    assert max(map(len, text.split("\n"))) <= WIDTH
    assert text.split("\n")[1].startswith("      word")


def test_a_word_that_is_too_long_stays_whole() -> None:
    assert wrapped("a " + "x" * 30 + " b", 10) == ["a", "x" * 30, "b"]
    assert wrapped("", 10) == [""]


def test_a_text_that_is_cut_says_so() -> None:
    assert cut("as it is", 8, "..") == "as it is"
    assert cut("longer than it may be", 8, "..") == "longer.."
    assert cut("a\x1bb", 8, "...") == "a?b"
