"""How figures, columns and texts are written."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.client.ctl.output import age, counted, counts, pairs, share, size, table, words


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        *((size(value), text) for value, text in ((0, "0 B"), (1536, "1.50 KiB"), (102_464, "100 KiB"))),
        *((age(value), text) for value, text in ((-3, "0s"), (0.0004, "<1 ms"), (0.04, "40 ms"), (0.9999, "999 ms"))),
        *((age(value), text) for value, text in ((1.9, "1s"), (192, "3m12s"), (3600, "1h00m"), (90061, "1d01h"))),
        *((age(value), text) for value, text in ((864000, "10d00h"), (1e9, "11574d"))),
        *((counted(value, "use", "uses"), text) for value, text in ((0, "0 uses"), (1, "1 use"), (1000, "1,000 uses"))),
        (share(0, 0), "-"),
        (share(1, 8), "12.5 %"),
        (counts({"ttl": 0, "explicit": 12345}), "explicit 12,345"),
        (counts({}), "none"),
    ],
)
def test_figures_are_short(shown: str, text: str) -> None:
    assert shown == text


def test_the_fields_of_a_document_are_written_by_their_names() -> None:
    body: dict[str, Any] = {"pid": 4242, "n": 4242, "used_bytes": 1536, "up_s": 61.0, "share": 0.5, "name": None}
    body |= {"puts": {"stored": 1000, "none": 0}, "age_s": {"median": 3600.0}}
    assert words(body, "{pid} {n} {used_bytes} {up_s} {share} {name}; {puts}; {age_s[median]}") == (
        "4242 4,242 1.50 KiB 1m01s 50.0 % unknown; stored 1,000; 1h00m"
    )


def test_a_client_s_name_cannot_move_the_cursor() -> None:
    assert table(("NAME",), [("\x1b[2Jgone\n",)]) == "NAME\n?[2Jgone?"
    assert "\x1b" not in pairs([("name", "\x1b[2J")])
