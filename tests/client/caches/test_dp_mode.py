"""recommend_dp_mode: when, why, and which published figure."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tensord.client.caches.dp_mode import recommend_dp_mode
from tensord.errors import UsageError


@pytest.mark.parametrize(
    ("images", "resolution", "depth", "use_dp", "gain", "row"),
    [
        (1, 511, 44, False, None, ""),
        (1, (1024, 255), 1, False, None, ""),
        (1, None, None, False, None, ""),
        (1, 256, 27, False, None, "no row decides"),
        (10, 256, 45, False, 9.5, "row: 10 images a batch"),
        (10, (512, 128), 1, False, None, ""),
        (20, 256, 45, False, 8.1, "row: 256 pixels a side"),
        (10, 257, 1, True, None, ""),
        (10, None, None, True, None, ""),
        (2, 64, 27, True, None, "no row for this, it has images a batch: 1, 3, 10"),
        (3, 64, 1, True, 16.0, "row: 3 images a batch"),
        (1, 512, 1, True, 14.6, "row: 512 pixels a side"),
        (1, (1024, 256), 1, True, None, ""),
        (1, (2048, 512), 1, True, None, "no row for this, it has pixels a side: 256, 512, 1024"),
        (2, 1024, 45, True, 16.2, "row: 1024 pixels a side"),
        (1, 64, 45, True, 17.7, "row: 45 layers"),
        (1, 64, 50, True, None, "no row for this, it has layers: 27, 45, 63"),
    ],
)
def test_each_threshold_decides_at_its_very_value_and_the_gain_is_the_published_figure_of_the_row_that_decides(
    images: int, resolution: Any, depth: Any, use_dp: bool, gain: float | None, row: str
) -> None:
    found = recommend_dp_mode(images, resolution, depth)
    assert (found.use_dp, found.flag) == (use_dp, "--mm-encoder-tp-mode data" if use_dp else None)
    assert found.reason and found.source.startswith("AMD") and found.source.endswith(row)
    assert not row or found.expected_gain_percent == gain


@pytest.mark.parametrize(
    ("images", "resolution", "depth", "names"),
    [
        (0, 64, 1, "batch_images is 0"),
        (True, 64, 1, "batch_images is True"),
        (1, (64, -1), 1, "resolution is -1"),
        (1, (64, 64, 3), 1, "resolution is (64, 64, 3)"),
        (1, 64, "deep", "encoder_depth is 'deep'"),
    ],
)
def test_nonsense_is_an_error_that_names_the_argument_and_its_value(
    images: Any, resolution: Any, depth: Any, names: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(names)):
        recommend_dp_mode(images, resolution, depth)
