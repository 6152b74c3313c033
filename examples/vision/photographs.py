"""The real photographs in scikit-image's wheel; nothing is downloaded.

Owns: the choice of the photographs, and their conversion to RGB pixels of one size. Does not import scikit-image.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image

# Pictures of a lens, a microscope or a telescope. Drawings, test patterns and pictures under 190 pixels are left out.
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
    """One photograph in the encoder's form: `pixels` uint8 (side, side, 3), read-only."""

    name: str
    pixels: npt.NDArray[np.uint8]


def folder() -> Path:
    """The pictures of the installed scikit-image. Raises FileNotFoundError, with the remedy."""
    spec = importlib.util.find_spec("skimage")
    for place in (spec.submodule_search_locations if spec else None) or ():
        if (found := Path(place, "data")).is_dir():
            return found
    raise FileNotFoundError("no photographs: scikit-image is not installed; pip install scikit-image")


def load(file: str, side: int = 448) -> Photograph:
    """The photograph in `file` as RGB, scaled to `side` × `side` pixels; a grey one has three equal channels."""
    with Image.open(folder() / file) as picture:
        rgb = picture.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
    pixels = np.asarray(rgb)
    pixels.flags.writeable = False
    return Photograph(Path(file).stem, pixels)


def load_all(side: int = 448) -> list[Photograph]:
    """Every photograph of `FILES`, scaled to `side` × `side` pixels."""
    return [load(file, side) for file in FILES]
