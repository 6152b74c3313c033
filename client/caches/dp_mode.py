"""Recommends whether an engine should run its vision encoder data parallel, and quotes AMD's measured gains.

Owns: the thresholds and AMD's table. Does not own: the flag, which is vLLM's. With `--mm-encoder-tp-mode data` each
rank encodes whole images of a batch, instead of a share of each layer.
Invariants: a gain is a figure of the table, for a value that was measured. No values are interpolated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...errors import UsageError, shown
from ..arguments.checks import check_count

__all__ = ["Recommendation", "recommend_dp_mode"]

Resolution = int | tuple[int, int]
"""(width, height) in pixels, or the side of a square."""

FLAG: Final = ("--mm-encoder-tp-mode", "data")
IMAGES_MIN: Final = 2
SIDE_MIN: Final = 512
PIXELS_MIN: Final = SIDE_MIN * SIDE_MIN
DEPTH_MIN: Final = 45
MANY_IMAGES: Final = 10
SMALL_SIDE: Final = 256
SMALL_PIXELS: Final = SMALL_SIDE * SMALL_SIDE

IMAGES_MAX: Final = 1 << 20
SIDE_MAX: Final = 1 << 20
DEPTH_MAX: Final = 1 << 12

_SOURCE: Final = "AMD, batch-level data parallelism of vision encoders on 8×MI300X, average gain in requests/s"
_BY_IMAGES: Final = {1: 13.4, 3: 16.0, 10: 9.5}
_BY_SIDE: Final = {256: 8.1, 512: 14.6, 1024: 16.2}
_BY_DEPTH: Final = {27: 6.2, 45: 17.7, 63: 15.0}

_Criterion = tuple[str, int | None, dict[int, float]]
"""A measure of the work, its value, and its rows of the table."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommendation, its reason, and the expected gain.

    `expected_gain_percent` is in requests per second, of data over tensor parallel, whether data parallel is
    recommended or not; None if these values were not measured. `source` names the publisher and the row of the table.

    Example:
        >>> advice = tensord.recommend_dp_mode(batch_images=3, resolution=(1024, 1024), encoder_depth=45)
        >>> advice.use_dp, advice.flag, advice.expected_gain_percent
        (True, '--mm-encoder-tp-mode data', 16.0)
    """

    use_dp: bool
    reason: str
    expected_gain_percent: float | None
    source: str

    @property
    def flag(self) -> str | None:
        """The flag to start vLLM with; None if vLLM's default is right."""
        return " ".join(FLAG) if self.use_dp else None

    @property
    def args(self) -> list[str]:
        """The flag as a list of command-line arguments; empty if vLLM's default is right."""
        return list(FLAG) if self.use_dp else []


def recommend_dp_mode(batch_images: int, resolution: Resolution | None, encoder_depth: int | None) -> Recommendation:
    """Whether to encode data parallel.

    Recommended from 2 images a batch, from 512×512 pixels (or as many in another shape), or from 45 layers. Not
    recommended for 10 or more images of at most 256×256 pixels, whatever the depth, because the gain diminishes there.

    Args:
        batch_images: images in a batch, 1 or more.
        resolution: of an image, (width, height) in pixels or the side of a square; None if unknown.
        encoder_depth: layers of the vision encoder; None if unknown.

    Raises:
        UsageError: a value is out of its range; the message names it.
    """
    images = check_count("batch_images", batch_images, IMAGES_MAX, 1)
    sides = None if resolution is None else check_resolution(resolution)
    pixels = 0 if sides is None else sides[0] * sides[1]
    depth = 0 if encoder_depth is None else check_count("encoder_depth", encoder_depth, DEPTH_MAX, 1)
    # The table has squares only. Other shapes with as many pixels were not measured.
    side = sides[0] if sides and sides[0] == sides[1] else None
    shape = f"{sides[0]}×{sides[1]}" if sides else ""
    small, least = f"{SMALL_SIDE}×{SMALL_SIDE}", f"{SIDE_MIN}×{SIDE_MIN}"

    by_images: _Criterion = ("images a batch", images, _BY_IMAGES)
    by_size: _Criterion = ("pixels a side", side, _BY_SIDE)
    if images >= MANY_IMAGES and 0 < pixels <= SMALL_PIXELS:
        reason = f"diminishing returns: {images} images of {shape}, at most {small}"
        return _recommendation(False, reason, [by_images, by_size])
    criteria = [
        (images >= IMAGES_MIN, by_images, f"{images} images a batch, from {IMAGES_MIN} up"),
        (pixels >= PIXELS_MIN, by_size, f"{shape}, from {least} up"),
        (depth >= DEPTH_MIN, ("layers", depth, _BY_DEPTH), f"{depth} layers, from {DEPTH_MIN} up"),
    ]
    met = [(criterion, reason) for is_met, criterion, reason in criteria if is_met]
    reason = "; ".join(reason for _, reason in met)
    if not met:
        reason = f"one image, below {least} and {DEPTH_MIN} layers as far as is known"
    return _recommendation(bool(met), reason, [criterion for criterion, _ in met])


def check_resolution(resolution: object) -> tuple[int, int]:
    """Returns (width, height).

    Raises:
        UsageError: `resolution` is not the size of an image.
    """
    sides = resolution if isinstance(resolution, tuple | list) else (resolution, resolution)
    if len(sides) != 2:
        raise UsageError(f"resolution is {shown(resolution)}; pass (width, height) in pixels, or the side of a square")
    width, height = sides
    return check_count("resolution", width, SIDE_MAX, 1), check_count("resolution", height, SIDE_MAX, 1)


def _recommendation(use_dp: bool, reason: str, deciding: list[_Criterion]) -> Recommendation:
    """A recommendation with the gain of the first deciding criterion that has a row."""
    for name, value, rows in deciding:
        if value in rows:
            return Recommendation(use_dp, reason, rows[value], f"{_SOURCE}; row: {value} {name}")
    has = "; ".join(f"{name}: {', '.join(map(str, rows))}" for name, _, rows in deciding)
    return Recommendation(
        use_dp, reason, None, f"{_SOURCE}; " + (f"no row for this, it has {has}" if has else "no row decides")
    )
