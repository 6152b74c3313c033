"""The demo's photographs: enough of them, real, different, and ready for the encoder."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

pytest.importorskip("skimage")

import photographs


def test_there_are_at_least_twelve_and_all_differ() -> None:
    pictures = photographs.load_all(side=64)
    assert len(pictures) >= 12
    assert len({hashlib.sha256(p.pixels.tobytes()).digest() for p in pictures}) == len(pictures)
    assert len({p.name for p in pictures}) == len(pictures)


@pytest.mark.parametrize("file", photographs.FILES)
def test_each_is_rgb_of_the_side_asked_for_with_content_and_read_only(file: str) -> None:
    pixels = photographs.load(file, side=448).pixels
    assert pixels.shape == (448, 448, 3)
    assert pixels.dtype == np.uint8
    assert pixels.std() > 5
    assert not pixels.flags.writeable


def test_a_grey_photograph_has_three_equal_channels() -> None:
    pixels = photographs.load("camera.png", side=224).pixels
    assert (pixels[..., :1] == pixels).all()
