"""The basis of the cells: no payload is mistaken for another."""

from __future__ import annotations

import pytest

from .payloads import key_of, namespace, words, wrong

NAMESPACE = namespace("payloads")
KEY = key_of(NAMESPACE, "one")


def test_a_payload_is_right_under_its_key_alone_or_in_a_tree() -> None:
    assert not wrong(words(KEY), KEY)
    assert not wrong({"a": words(KEY)}, KEY)


@pytest.mark.parametrize(
    "other",
    [words(key_of(NAMESPACE, "two")), words(KEY, weights=1), words(key_of(NAMESPACE.raised_to(1), "one"))],
    ids=["another key's", "other weights'", "another generation's"],
)
def test_no_word_of_another_payload_is_taken_for_right(other: object) -> None:
    assert wrong(other, KEY).startswith("8192 of 8192 words are wrong")


def test_a_single_wrong_word_is_found() -> None:
    torn = words(KEY)
    torn[77, 3] += 1
    assert wrong(torn, KEY).startswith("1 of 8192 words are wrong; word 619 ")
