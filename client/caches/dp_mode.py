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

_SOURCE: Final = "AMD, batch-level data parallelism of vision encoders on 8×MI300X, average gain in requests/s"
_IMAGES: Final = "images a batch"
_SIDE: Final = "pixels a side"
_LAYERS: Final = "layers"
_GAINS: Final = {
    _IMAGES: {1: 13.4, 3: 16.0, 10: 9.5},
    _SIDE: {256: 8.1, 512: 14.6, 1024: 16.2},
    _LAYERS: {27: 6.2, 45: 17.7, 63: 15.0},
}
"""The measured gains by a measure of the work, and its value."""


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
        return "--mm-encoder-tp-mode data" if self.use_dp else None


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
    images = check_count("batch_images", batch_images, 1 << 20, 1)
    width, height = (0, 0) if resolution is None else _sides(resolution)
    depth = 0 if encoder_depth is None else check_count("encoder_depth", encoder_depth, 1 << 12, 1)
    pixels, shape = width * height, f"{width}×{height}"
    # The table has squares only. Other shapes with as many pixels were not measured.
    measured = {_IMAGES: images, _SIDE: width if width == height else None, _LAYERS: depth}
    if images >= 10 and 0 < pixels <= 256**2:
        reasons = {_IMAGES: f"diminishing returns: {images} images of {shape}, at most 256×256", _SIDE: ""}
        use_dp = False
    else:
        reasons = {}
        if images >= 2:
            reasons[_IMAGES] = f"{images} images a batch, from 2 up"
        if pixels >= 512**2:
            reasons[_SIDE] = f"{shape}, from 512×512 up"
        if depth >= 45:
            reasons[_LAYERS] = f"{depth} layers, from 45 up"
        use_dp = bool(reasons)
    reason = "; ".join(filter(None, reasons.values())) or "one image, below 512×512 and 45 layers as far as is known"
    for name in reasons:
        if (value := measured[name]) in _GAINS[name]:
            return Recommendation(use_dp, reason, _GAINS[name][value], f"{_SOURCE}; row: {value} {name}")
    has = "; ".join(f"{name}: {', '.join(map(str, _GAINS[name]))}" for name in reasons)
    row = f"no row for this, it has {has}" if has else "no row decides"
    return Recommendation(use_dp, reason, None, f"{_SOURCE}; {row}")


def _sides(resolution: object) -> tuple[int, int]:
    sides = resolution if isinstance(resolution, tuple | list) else (resolution, resolution)
    if len(sides) != 2:
        raise UsageError(f"resolution is {shown(resolution)}; pass (width, height) in pixels, or the side of a square")
    width, height = sides
    return check_count("resolution", width, 1 << 20, 1), check_count("resolution", height, 1 << 20, 1)
