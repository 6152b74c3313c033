"""What engines share and what not, with vLLM's own classes around the connector and a real daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tensord
from tests.daemon_process import Daemon

from ..conftest import fresh, keys
from ..step_bench import ROWS, Steps, attached, encoded, feature, item, other_name, request
from ..tiny_llava import WIDTH
from .stand import counted, encode, finds, nothing_left, settled

pytestmark = pytest.mark.usefixtures("patient")


# ---- sharing


@pytest.mark.parametrize(
    ("runner", "dtype"), [("v1", torch.float32), ("v1", torch.bfloat16), ("v2", torch.float16)], ids=str
)
def test_pictures_encoded_by_one_engine_are_not_encoded_by_another(
    shared: Daemon, runner: str, dtype: torch.dtype
) -> None:
    """Model Runner V2, what GPUs use by default, calls the connector in its own way. The runner itself needs a GPU."""
    with (
        Steps(shared.socket, ranks=2, runner=runner, dtype=dtype) as one,
        Steps(other_name(shared.socket, 1), ranks=2, runner=runner, dtype=dtype) as another,
    ):
        pictures = [fresh() for _ in range(3)]
        encode(attached(one), *pictures)
        nothing_left(one)
        assert finds(attached(another), *pictures)
        nothing_left(another)
        assert another.encoded == []
        # One rank stores what all ranks load.
        assert (counted(one, "saves"), counted(another, "hits"), counted(another, "loads")) == (3, 3, 6)


def test_two_requests_with_one_name_for_two_pictures_never_cross(first: Steps, second: Steps) -> None:
    one, another = fresh(), fresh()
    encode(first, one, another)
    name = f"clients-{one}"
    asked = [request(feature(item(number), name)) for number in (one, another)]
    for wanted in asked:
        second.add(wanted)
        settled(second, wanted)
    side = second.connector._scheduler
    assert side is not None
    for wanted, number in zip(asked, (one, another), strict=True):
        assert second.connector.ensure_cache_available(wanted, 0)
        assert second.connector.has_cache_item(name)
        lease = side._asking[wanted.request_id].inputs[name].lease
        assert lease is not None
        assert np.array_equal(lease.tree, encoded(item(number)).numpy())


def a_handle() -> Any:
    stands_in = item(fresh())
    stands_in["address"] = stands_in.pop("pixel_values")
    stands_in["address"].data = 4096  # type: ignore[assignment]
    return stands_in


@pytest.mark.parametrize(
    "make",
    [lambda: [item(fresh()), item(fresh())], lambda: [None], lambda: [a_handle()]],
    ids=["one name for two pictures", "no content", "a handle"],
)
def test_an_input_whose_name_does_not_tell_its_content_is_not_shared(first: Steps, make: Callable[[], Any]) -> None:
    name, before = f"clients-{fresh()}", counted(first, "unshared")
    asked = request(*(feature(data, name, 1 + number * (ROWS + 1)) for number, data in enumerate(make())))
    settled(first, asked)
    assert not first.connector.has_cache_item(name)
    first.connector.request_finished(asked)
    assert counted(first, "unshared") == before + 1


# ---- what does not fit


@pytest.mark.parametrize(
    "stored",
    [
        np.zeros((ROWS - 1, WIDTH), np.float32),
        np.zeros((ROWS, WIDTH // 2), np.float32),
        np.zeros((ROWS, WIDTH), np.float64),
        np.zeros((ROWS, WIDTH, 1), np.float32),
        {"hidden": np.zeros((ROWS, WIDTH), np.float32)},
    ],
    ids=["rows", "width", "dtype", "dimensions", "tree"],
)
def test_an_encoding_of_the_wrong_shape_is_a_miss_and_counted(
    shared: Daemon, first: Steps, second: Steps, stored: Any
) -> None:
    there = keys(shared)
    picture = encode(first)
    (key,) = keys(shared) - there
    with tensord.Client(shared.socket) as client:
        client.evict(key)
        assert client.put(key, stored, wait=True).state == "stored"
    before = counted(second, "mismatches")
    assert not finds(second, picture)
    assert counted(second, "mismatches") == before + 1


def test_an_output_of_another_width_than_the_measured_one_is_a_mismatch(shared: Daemon) -> None:
    def measured(config: Any) -> None:
        config.ec_transfer_config.mm_encoder_output_widths = {"image": 2 * WIDTH}

    with Steps(shared.socket) as one, Steps(other_name(shared.socket, 1), change=measured) as another:
        assert not finds(another, encode(one))
        assert counted(another, "mismatches") == 1
