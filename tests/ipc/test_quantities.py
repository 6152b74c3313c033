from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.ipc.quantities import DURATION_WANTS, SIZE_WANTS, read_duration, read_size, show_duration, show_size

SIZES = [("0", 0), ("1048576", 1 << 20), ("4GiB", 4 << 30), ("4 gib", 4 << 30), ("4G", 4 << 30), ("4GB", 4 * 10**9)]
SIZES += [("1.5KiB", 1536), ("7B", 7)]
DURATIONS = [("5", 5), ("0.5", 0.5), ("10m", 600), ("1h30m", 5400), ("1h 30m", 5400), ("250ms", 0.25)]


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [*((read_size, *each) for each in SIZES), *((read_duration, *each) for each in DURATIONS)],
)
def test_sizes_and_durations_are_read(read: Callable[[str], float], text: str, value: float) -> None:
    assert read(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("read", "given_", "says"),
    [
        *((read_size, text, f"is not {SIZE_WANTS}") for text in ("4X", "-1", "1e3", "", "GiB", "0x10", "1,5GiB")),
        *((read_size, given_, "is a fraction of a byte; wanted: a size") for given_ in ("0.97", "1.5B", 1.5, "2.0")),
        *((read_duration, text, f"is not {DURATION_WANTS}") for text in ("soon", "-5s", "5y", "")),
    ],
)
def test_what_is_no_quantity_is_refused_with_its_text_and_the_format(
    read: Callable[[object], float], given_: object, says: str
) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        read(given_)
    assert str(refused.value).startswith(repr(given_))


@given(st.integers(0, 1 << 60))
def test_a_size_reads_back_as_it_is_shown(value: int) -> None:
    assert read_size(show_size(value)) == value


@given(st.integers(1, 10**9))
def test_a_duration_of_whole_milliseconds_reads_back_as_it_is_shown(value: int) -> None:
    assert read_duration(show_duration(value / 1000)) == pytest.approx(value / 1000, rel=1e-5)
