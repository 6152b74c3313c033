"""`tensorctl advise`, through a real daemon; and its words for each answer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.client.ctl.advise import advice_text
from tensord.client.ctl.tables import WIDTH
from tensord.errors import VersionMismatch

from ...daemon_process import MIB, Daemon
from .conftest import Ctl

MULTIPLES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0)


def key(number: int) -> bytes:
    return tensord.Namespace(model="m", revision="r", dtype="f4", processor="p").key("e", "image", b"%d" % number)


def curve(namespace: str | None, ratios: tuple[float, ...], error: float = 0.01) -> dict[str, Any]:
    points = [[int(at * 1000 * MIB), ratio, error] for at, ratio in zip(MULTIPLES, ratios, strict=True)]
    return {"namespace": namespace, "requests": 12345.0, "points": points}


RISING = (0.1, 0.2, 0.3, 0.43, 0.5, 0.61, 0.65, 0.7, 0.9)


def answer(*curves: dict[str, Any]) -> dict[str, Any]:
    told = {"policy": "hazard", "here": 0.452, "capacity_bytes": 1000 * MIB, "sampled_requests": 99}
    return {**told, "curves": list(curves)}


def test_a_ring_of_twice_the_size_is_compared_with_the_present_one() -> None:
    text = advice_text(answer(curve(None, RISING), curve("aa" * 8, RISING)))
    assert "twice the ring, 1.95 GiB, would find 61.0 % instead of 43.0 %" in text
    assert "half the ring, 500 MiB, would find 20.0 % instead of 43.0 %" in text
    assert "found here  45.2 %, under policy hazard" in text
    assert "by namespace" not in text
    assert all(len(line) <= WIDTH for line in text.splitlines())


def test_namespaces_have_rows_of_their_own_if_there_are_several() -> None:
    text = advice_text(answer(curve(None, RISING), curve("aa" * 8, RISING), curve("bb" * 8, RISING)))
    row = next(line for line in text.splitlines() if line.startswith("bb" * 8))
    assert row.split() == ["bb" * 8, "12,345", "20.0", "%", "43.0", "%", "61.0", "%", "70.0", "%", "90.0", "%"]
    assert all(len(line) <= WIDTH for line in text.splitlines())


def test_a_difference_within_the_error_is_called_one_that_nobody_can_tell() -> None:
    text = advice_text(answer(curve(None, (*RISING[:5], 0.45, *RISING[6:]), error=0.05)))
    assert "would find 45.0 % instead of 43.0 %: no difference that the estimate can tell" in " ".join(text.split())


def test_without_any_reuse_no_ring_is_said_to_find_more() -> None:
    text = advice_text({**answer(curve(None, (0.0,) * 9, error=0.004)), "here": 0.0})
    assert "reuse       none seen: a ring of up to 8 times the size, 7.81 GiB, would find nothing either" in text
    assert "twice the ring" not in text
    assert "half the ring" not in text
    assert "8.00  7.81 GiB      0.0 %  ± 0.4" in text
    assert all(len(line) <= WIDTH for line in text.splitlines())


def test_keys_that_are_put_once_and_never_used_are_told_as_no_reuse(daemon: Daemon, ctl: Ctl) -> None:
    """One key in 16 is sampled. Of these keys the sample has a tenth too few."""
    client = daemon.client()
    for number in range(6000, 9000):
        client.put(key(number), np.zeros(16, np.uint8), wait=number % 100 == 99)
    daemon.until(lambda now: now["store"]["hit_ratios"]["sampled"] > 1, "the keys are sampled")
    told = json.loads(ctl("advise", "--json").out)
    assert told["curves"][0]["requests"] == 3000
    assert {ratio for _, ratio, _ in told["curves"][0]["points"]} == {0.0}
    assert all(0 < error < 0.05 for _, _, error in told["curves"][0]["points"])
    assert "none seen" in ctl("advise").out


def test_without_requests_there_is_no_advice() -> None:
    nothing = {**curve(None, (0.0,) * 9), "requests": 0}
    assert "nothing is known yet" in advice_text(answer(nothing))


@pytest.mark.parametrize("missing", ["curves", "capacity_bytes", "here"])
def test_an_answer_of_another_version_is_named(missing: str) -> None:
    told = answer(curve(None, RISING))
    del told[missing]
    with pytest.raises(VersionMismatch, match=missing):
        advice_text(told)


def test_a_loop_over_more_than_the_ring_is_seen_to_fit_twice_the_ring(daemon: Daemon, ctl: Ctl) -> None:
    """The ring has 16 MiB."""
    client = daemon.client()
    for _ in range(4):
        for number in range(24):
            if client.get(key(number)) is None:
                client.put(key(number), np.zeros(MIB - 4096, np.uint8), wait=True)
    daemon.until(lambda now: now["store"]["hit_ratios"]["since_start"]["requests"] >= 4 * 24, "all requests are known")
    told = json.loads(ctl("advise", "--json").out)
    ratios = {round(at / told["capacity_bytes"], 2): ratio for at, ratio, _ in told["curves"][0]["points"]}
    assert ratios[1.0] < 0.1
    assert ratios[2.0] == pytest.approx(0.75, abs=0.05)
    assert "twice the ring" in ctl("advise").out
