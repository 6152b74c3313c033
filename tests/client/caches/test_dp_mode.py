"""recommend_dp_mode: when, why, and which published figure."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tensord.client.caches.dp_mode import recommend_dp_mode
from tensord.errors import UsageError


@pytest.mark.parametrize(
    ("images", "resolution", "depth", "expected"),
    [
        (2, 64, 1, True),
        (1, 511, 44, False),
        (1, 512, 1, True),
        (1, (1024, 256), 1, True),
        (1, (1024, 255), 1, False),
        (1, 64, 45, True),
        (10, 256, 1, False),
        (10, 257, 1, True),
        (10, (512, 128), 1, False),
        (1, None, None, False),
        (10, None, None, True),
    ],
)
def test_each_threshold_decides_at_its_very_value_and_many_small_images_win_over_the_rest(
    images: int, resolution: Any, depth: Any, expected: bool
) -> None:
    recommendation = recommend_dp_mode(images, resolution, depth)
    assert recommendation.use_dp is expected
    assert recommendation.reason
    assert recommendation.flag == ("--mm-encoder-tp-mode data" if expected else None)


@pytest.mark.parametrize(
    ("images", "resolution", "depth", "gain", "row"),
    [
        (3, 64, 1, 16.0, "row: 3 images a batch"),
        (1, 512, 1, 14.6, "row: 512 pixels a side"),
        (1, 64, 45, 17.7, "row: 45 layers"),
        (2, 1024, 45, 16.2, "row: 1024 pixels a side"),
        (10, 256, 45, 9.5, "row: 10 images a batch"),
        (20, 256, 45, 8.1, "row: 256 pixels a side"),
        (2, 64, 27, None, "no row for this, it has images a batch: 1, 3, 10"),
        (1, (2048, 512), 1, None, "no row for this, it has pixels a side: 256, 512, 1024"),
        (1, 64, 50, None, "no row for this, it has layers: 27, 45, 63"),
        (1, 256, 27, None, "no row decides"),
    ],
)
def test_the_gain_is_the_published_figure_of_the_row_that_decides_and_none_is_made_up(
    images: int, resolution: Any, depth: int, gain: float | None, row: str
) -> None:
    recommendation = recommend_dp_mode(images, resolution, depth)
    assert recommendation.expected_gain_percent == gain
    assert recommendation.source.startswith("AMD") and recommendation.source.endswith(row)


@pytest.mark.parametrize(
    ("images", "resolution", "depth", "names"),
    [
        (0, 64, 1, "batch_images is 0"),
        (True, 64, 1, "batch_images is True"),
        (1, (64, -1), 1, "resolution is -1"),
        (1, (64, 64, 3), 1, "resolution is (64, 64, 3)"),
        (1, "64x64", 1, "resolution is '64x64'"),
        (1, 64, "deep", "encoder_depth is 'deep'"),
    ],
)
def test_nonsense_is_an_error_that_names_the_argument_and_its_value(
    images: Any, resolution: Any, depth: Any, names: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(names)):
        recommend_dp_mode(images, resolution, depth)
