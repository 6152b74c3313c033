from __future__ import annotations

import pytest

from tensord.daemon.config.settings import ADDRESS, COUNT, MODE, SHARE, SWITCH, Kind, host_and_port


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (COUNT, "0x10"),
        (COUNT, ""),
        (SHARE, "half"),
        (MODE, "rw-r-----"),
        (SWITCH, "2"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(kind: Kind, text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the caller words the complaint
        kind.read(text)


@pytest.mark.parametrize("kind", [COUNT, SHARE, MODE])
def test_a_truth_value_is_no_number(kind: Kind) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        kind.read(True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("127.0.0.1:9477", ("127.0.0.1", 9477)),
        ("[::1]:9477", ("::1", 9477)),
        ("metrics.example:0", ("metrics.example", 0)),
    ],
)
def test_addresses(text: str, value: tuple[str, int]) -> None:
    assert host_and_port(text) == value
    assert ADDRESS.read(text) == text


@pytest.mark.parametrize(
    "text",
    ["", "9477", ":9477", "::1:9477", "[::1]", "[::1", "a:b", "a:70000", "a b:1", "http://a:1", "a:1/x", "a:-1", "a:٣"],
)
def test_a_text_that_is_not_an_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the caller words the complaint
        ADDRESS.read(text)
