"""VisualCache: pictures and recordings by content, and what is counted."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import count
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tensord
from tensord.client.caches.measures import array_bytes
from tensord.client.caches.visual import VisualCache
from tensord.errors import UsageError

from ...daemon_process import COUNTING_OFTEN, Daemon

_numbers = count()
IMAGE = b"\x89PNG picture"
EMBEDDING = np.arange(64, dtype=np.float32).reshape(4, 16)
"""256 bytes."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(COUNTING_OFTEN, gauges_host="none") as running:
        yield running.start()


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> tensord.Client:
    return daemon.client()


@pytest.fixture
def namespace() -> tensord.Namespace:
    return tensord.Namespace(model=f"model-{next(_numbers)}", revision="1", dtype="float32", processor="none")


def stored(cache: VisualCache, raw: bytes, embedding: Any = EMBEDDING, **more: Any) -> tensord.Put:
    put = cache.store("image", raw, embedding, **more)
    return put.wait(30) if put.state == "sent" else put


def test_an_embedding_of_a_picture_comes_back(client: tensord.Client, namespace: tensord.Namespace) -> None:
    cache = VisualCache(client, namespace)
    missed = cache.lookup("image", IMAGE)
    assert not missed.hit and missed.entry is None and missed.bytes_saved == 0
    with pytest.raises(ValueError, match="missed"):
        _ = missed.embedding

    assert stored(cache, IMAGE).state == "stored"
    with cache.lookup("image", IMAGE) as found:
        assert found.hit
        np.testing.assert_array_equal(found.embedding, EMBEDDING)
        assert not found.embedding.flags.writeable
        assert found.bytes_saved == 256 and found.entry is not None
        kept = found.embedding
    with pytest.raises(ValueError, match="released"):
        _ = found.embedding
    np.testing.assert_array_equal(kept, EMBEDDING)


@pytest.mark.parametrize(
    ("tree", "size_bytes"),
    [
        (np.float32(1.5), 4),
        (np.zeros(7, np.uint8), 7),
        (np.zeros((2, 3, 4, 5, 6), np.float16), 1440),
        (np.zeros((0, 4), np.float32), 0),
        (np.zeros((3, 5), ml_dtypes.float8_e4m3fn), 15),
        (np.zeros((8, 8), np.float32)[::2, ::2], 64),
        (torch.zeros(2, 3, 4, dtype=torch.bfloat16), 48),
        ({"a": [np.zeros(2, np.float32), (torch.zeros(3), {"b": b"xyz"})], "c": None, "d": "text", "e": 7}, 23),
        ([], 0),
    ],
)
def test_sizes_are_right_for_any_shape_dtype_and_nesting(
    client: tensord.Client, namespace: tensord.Namespace, tree: Any, size_bytes: int
) -> None:
    assert array_bytes(tree) == size_bytes
    cache = VisualCache(client, namespace)
    stored(cache, IMAGE, tree)
    assert cache.lookup("image", IMAGE).bytes_saved == size_bytes


def test_statistics_have_these_names_and_clear_sets_them_to_0(
    client: tensord.Client, namespace: tensord.Namespace
) -> None:
    cache = VisualCache(client, namespace, encoder_depth=27)
    assert list(cache.statistics().values()) == [0, 0, 0.0, 0, 0]
    cache.lookup("image", IMAGE, batch_images=1, resolution=64)
    stored(cache, IMAGE)
    stored(cache, b"unseen")
    for _ in range(3):
        cache.lookup("image", IMAGE, batch_images=2)
    assert cache.statistics() == {
        "visual_cache_hits": 3,
        "visual_cache_misses": 1,
        "visual_cache_hit_rate": 0.75,
        "visual_vram_saved_bytes": 3 * 256,
        "dp_mode_recommendations": 3,
    }
    assert cache.clear() == 2
    assert list(cache.statistics().values()) == [0, 0, 0.0, 0, 0]
    assert not any(client.contains(cache.key("image", raw)) for raw in (IMAGE, b"unseen"))


def test_a_lookup_recommends_by_what_it_is_told_and_by_the_encoders_depth(
    client: tensord.Client, namespace: tensord.Namespace
) -> None:
    for depth, resolution, recommended in ((None, 1024, True), (None, (256, 256), False), (63, 256, True)):
        found = VisualCache(client, namespace, encoder_depth=depth).lookup("image", IMAGE, resolution=resolution)
        assert found.recommendation is not None and found.recommendation.use_dp is recommended
    assert VisualCache(client, namespace, encoder_depth=63).lookup("audio", IMAGE).recommendation is None


def test_an_entry_of_another_client_is_a_hit_and_is_not_stored_again(
    daemon: Daemon, client: tensord.Client, namespace: tensord.Namespace
) -> None:
    stored(VisualCache(daemon.client(), namespace), IMAGE)
    cache = VisualCache(client, namespace)
    assert cache.lookup("image", IMAGE).hit
    assert stored(cache, IMAGE).state == "existed"


def test_something_else_under_the_key_is_a_miss(client: tensord.Client, namespace: tensord.Namespace) -> None:
    cache = VisualCache(client, namespace)
    for number, body in enumerate([EMBEDDING, {"other": EMBEDDING}, [1, 2]]):
        raw = str(number).encode()
        client.put(cache.key("image", raw), body, wait=True)
        assert not cache.lookup("image", raw).hit


def test_nonsense_is_an_error_that_names_it(client: tensord.Client, namespace: tensord.Namespace) -> None:
    cache = VisualCache(client, namespace)
    wrong: list[tuple[Any, str]] = [
        (lambda: cache.lookup("smell", IMAGE), "modality is 'smell'"),  # type: ignore[arg-type]
        (lambda: cache.lookup("image", "path.png"), "raw is a str"),  # type: ignore[arg-type]
        (lambda: cache.lookup("image", np.array([object()])), "raw is an array of dtype object"),
        (lambda: cache.lookup("image", IMAGE, batch_images=0), "batch_images is 0"),
        (lambda: cache.lookup("image", IMAGE, resolution=(1, math.inf)), "resolution is inf"),  # type: ignore[arg-type]
        (lambda: VisualCache(client, namespace, encoder_depth=0), "encoder_depth is 0"),
    ]
    for call, named in wrong:
        with pytest.raises(UsageError, match=re.escape(named)):
            call()
