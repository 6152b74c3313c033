"""The real photographs that scikit-image's wheel carries; nothing is downloaded.

Owns: which of its pictures are photographs, and their way to RGB pixels of one size. scikit-image
itself is not imported.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image

# Through a lens, a microscope or a telescope: drawings, test patterns and pictures under 190 pixels
# are left out.
FILES: Final = (
    "astronaut.png",
    "brick.png",
    "camera.png",
    "cell.png",
    "chelsea.png",
    "clock_motion.png",
    "coffee.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "moon.png",
    "motorcycle_left.png",
    "motorcycle_right.png",
    "page.png",
    "retina.jpg",
    "rocket.jpg",
)


@dataclass(frozen=True, slots=True)
class Photograph:
    """One photograph as an encoder wants it: `pixels` uint8 (side, side, 3), read-only."""

    name: str
    pixels: npt.NDArray[np.uint8]


def folder() -> Path:
    """Where the installed scikit-image keeps its pictures; FileNotFoundError names the remedy."""
    spec = importlib.util.find_spec("skimage")
    for place in (spec.submodule_search_locations if spec else None) or ():
        if (found := Path(place, "data")).is_dir():
            return found
    raise FileNotFoundError("no photographs: scikit-image is not installed; pip install scikit-image")


def load(file: str, side: int = 448) -> Photograph:
    """The photograph in `file`, as RGB, brought to `side` × `side` pixels (grey ones have three
    equal channels).
    """
    with Image.open(folder() / file) as picture:
        rgb = picture.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
    pixels = np.asarray(rgb)
    pixels.flags.writeable = False
    return Photograph(Path(file).stem, pixels)


def load_all(side: int = 448) -> list[Photograph]:
    """Every photograph of `FILES`, at `side` × `side` pixels."""
    return [load(file, side) for file in FILES]
