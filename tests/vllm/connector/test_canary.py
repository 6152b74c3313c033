"""What is found wrong is not used for long: some hits are encoded all the same, and a difference ends sharing."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch

import tensord
from tensord.client.vllm.encoder.canary import TOLERANCES, difference
from tests.daemon_process import Daemon, until

from ..conftest import keys
from ..step_bench import ROWS, Steps, attached, encoded, item, other_name
from ..tiny_llava import WIDTH
from .stand import counted, encode, finds

pytestmark = pytest.mark.usefixtures("patient")
SELDOM = 1e-12


def stored(engine: Steps, pictures: int) -> list[int]:
    """Has the engine encode so many, and returns when all are stored."""
    return [encode(attached(engine)) for _ in range(pictures)]


def until_counted(engine: Steps, name: str, amount: int) -> None:
    until(lambda: counted(engine, name) == amount, f"{amount} {name}")


def test_the_first_hit_of_a_namespace_is_encoded_and_compared_and_later_ones_at_the_settings_rate(
    daemon: Daemon,
) -> None:
    with Steps(daemon.socket) as first, Steps(other_name(daemon.socket, 1), canary=SELDOM) as second:
        pictures = stored(first, 3)
        attached(second)
        assert [finds(second, picture) for picture in pictures] == [False, True, True]
        until_counted(second, "canaries", 1)
        until_counted(second, "hits", 2)
        assert not second.counts.get("canary_failures")
        until(lambda: second.step() is not None and second.held["steps"] == 0, "the compared entry to be let go")
    with Steps(daemon.socket, canary=1) as every:
        attached(every)
        assert not any(finds(every, picture) for picture in pictures)
        until_counted(every, "canaries", 3)


def test_a_hit_that_differs_from_this_engines_own_output_is_logged_evicted_and_ends_sharing(
    daemon: Daemon, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that the connector leaves the library's log where it is.
    monkeypatch.setattr(logging.getLogger("tensord"), "handlers", [caplog.handler])
    with Steps(daemon.socket, ranks=2) as first, Steps(other_name(daemon.socket, 1), canary=SELDOM, ranks=2) as second:
        picture, another = stored(first, 2)
        attached(second)
        client = daemon.client()
        right = encoded(item(picture)).numpy()
        leases = {key: client.get(key) for key in keys(daemon)}
        (key,) = [key for key, lease in leases.items() if lease is not None and np.array_equal(lease.tree, right)]
        client.evict(key)
        wrong = right * np.float32(1.1)
        assert client.put(key, wrong, wait=True).state == "stored"
        namespace = tensord.Namespace(model="other", revision="1", dtype="x", processor="none")
        other = namespace.key("encoder", "image", b"1")
        assert client.put(other, wrong, wait=True).state == "stored"
        assert not finds(second, picture), "it is its own encoding that is used"
        until_counted(second, "canary_failures", 1)
        until(lambda: keys(daemon) == {other}, "the namespace to be evicted")
        found = [record for record in caplog.records if "WRONG OUTPUT FOUND" in record.getMessage()]
        assert {record.levelno for record in found} == {logging.ERROR}
        assert key.hex() in found[0].getMessage()
        # From now on it finds and stores nothing there; others go on.
        stored_again = stored(first, 1)
        assert not finds(second, another, *stored_again)
        assert len(second.encoded) == 3
        until_counted(second, "unshared", 2)
        assert second.held["claims"] == 0 and len(keys(daemon)) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_is_no_difference_and_another_row_or_a_lost_number_is(dtype: torch.dtype) -> None:
    ours = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert difference(ours.clone(), ours) == 0
    # Each number one unit in the last place away.
    rounded = (ours.double() * (1 + torch.finfo(dtype).eps)).to(dtype)
    assert 0 < difference(rounded, ours) < TOLERANCES[dtype]
    swapped = ours.clone()
    swapped[[3, 4]] = ours[[4, 3]]
    assert difference(swapped, ours) > 10 * TOLERANCES[dtype]
    lost = ours.clone()
    lost[5, 6] = math.nan
    assert difference(lost, ours) == math.inf
    assert difference(ours[1:], ours) == difference(ours.double(), ours) == math.inf
    assert difference(ours, torch.zeros_like(ours)) == math.inf
