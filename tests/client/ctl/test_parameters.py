from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import pytest

from tensord.client.ctl.daemon import Daemon
from tensord.client.ctl.parameters import KEY, SIZE, TAG, keys_meant, matching
from tensord.errors import BadKey

TAG_A, TAG_B = "aa" * 8, "ab" * 8
STORED = [TAG_A + "11" * 24, TAG_A + "12" * 24, TAG_B + "11" * 24]


class _Stored(Daemon):
    """A daemon that stores these, and remembers which namespaces it was asked for."""

    def __init__(self, *keys: str) -> None:
        super().__init__()
        self.keys = keys
        self.asked: list[bytes | None] = []

    def entries(self, namespace: bytes | None = None, most: int | None = None) -> Iterator[dict[str, Any]]:
        self.asked.append(namespace)
        tag = "" if namespace is None else namespace.hex()
        return ({"key": key} for key in self.keys if key.startswith(tag))


def test_the_digits_that_only_one_key_begins_with_mean_that_key() -> None:
    meant = keys_meant(_Stored(*STORED), ["ab", TAG_A + "12"])
    assert meant == [bytes.fromhex(STORED[2]), bytes.fromhex(STORED[1])]


def test_digits_that_several_keys_begin_with_are_refused_with_their_number() -> None:
    with pytest.raises(BadKey, match=r"2 stored keys begin with aa: .*give more digits"):
        keys_meant(_Stored(*STORED), ["aa"])


def test_digits_that_no_key_begins_with_are_refused() -> None:
    with pytest.raises(BadKey, match="no stored key begins with ff"):
        keys_meant(_Stored(*STORED), ["ff"])


def test_a_whole_key_means_itself_and_asks_nobody() -> None:
    daemon = _Stored()
    assert keys_meant(daemon, ["0f" * 32]) == [bytes.fromhex("0f" * 32)]
    assert daemon.asked == []


def test_digits_that_name_a_namespace_walk_through_that_one_only() -> None:
    daemon = _Stored(*STORED)
    matching(daemon, [TAG_A + "11", TAG_A + "12"])
    matching(daemon, [TAG_A + "11", TAG_B + "11"])
    matching(daemon, ["aa", "aa"])
    assert daemon.asked == [bytes.fromhex(TAG_A), None, None]


def test_a_keys_digits_may_be_odd_in_number_and_capital() -> None:
    assert KEY.convert("AbC", None, None) == "abc"


@pytest.mark.parametrize("text", ["", "xyz", "0x12", "a" * 65, "12 34", "é"])
def test_an_invalid_key_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="1 to 64 hexadecimal digits"):
        KEY.convert(text, None, None)


@pytest.mark.parametrize("text", ["aa", "a" * 15, "a" * 17, "g" * 16])
def test_a_namespace_tag_is_given_in_full(text: str) -> None:
    with pytest.raises(click.BadParameter, match="16 hexadecimal digits"):
        TAG.convert(text, None, None)


@pytest.mark.parametrize("text", ["4X", "-1", "", "1e9", "999999TiB", "9" * 500])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        SIZE.convert(text, None, None)
