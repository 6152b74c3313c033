"""Sequences on a device, a query, and how many of its tokens are matched."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from tensord.client.prefix.layers import NormalLayer, PrefixLayer, RecurrentLayer, RotatingLayer, SharedLayer
from tensord.shm.payloads.prefix import Media


def media(start: int, length: int, modality: Any, number: int) -> Media:
    return Media(start, length, modality, hashlib.sha256(b"%d" % number).digest())


def row(*numbers: int) -> Any:
    return np.array(numbers, np.uint32)


def normal(length: int) -> PrefixLayer:
    return NormalLayer(np.zeros((1, length, 1), np.float32))


STATE = np.zeros(3, np.float32)

ROLLED = RotatingLayer(np.zeros((1, 4, 1), np.float32), 4)

IMAGES = [media(2, 2, "image", 11), media(6, 2, "image", 22)]

CASES: dict[str, tuple[list[tuple[Any, list[PrefixLayer], dict[int, Any], list[Media]]], Any, list[Media], int]] = {
    "a window that has rolled over cannot rewind": (
        [(row(*range(1, 11)), [ROLLED], {}, []), (row(1, 2, 3, 4, 5, 9), [normal(6)], {}, [])],
        row(1, 2, 3, 4, 5, 6, 7, 99),
        [],
        5,
    ),
    "but goes on from where it stands": ([(row(*range(1, 11)), [ROLLED], {}, [])], row(*range(1, 12)), [], 10),
    "a full match leaves one token": ([(row(*range(1, 11)), [normal(10)], {}, [])], row(*range(1, 11)), [], 9),
    "a state stands at its own position": (
        [(row(*range(1, 9)), [normal(8), RecurrentLayer(STATE)], {}, []), (row(1, 2, 3, 9), [normal(4)], {}, [])],
        row(*range(1, 9), 10),
        [],
        8,
    ),
    "and nowhere else": (
        [(row(*range(1, 9)), [normal(8), RecurrentLayer(STATE)], {}, []), (row(1, 2, 3, 9), [normal(4)], {}, [])],
        row(1, 2, 3, 4, 10),
        [],
        3,
    ),
    "the last snapshot before the difference": (
        [(row(*range(1, 9)), [RecurrentLayer(STATE), SharedLayer()], {2: [STATE], 5: [STATE]}, [])],
        row(1, 2, 3, 4, 5, 6, 10),
        [],
        5,
    ),
    "no snapshot within an item": (
        [(row(*range(1, 9)), [RecurrentLayer(STATE)], {2: [STATE], 5: [STATE]}, [media(4, 2, "image", 1)])],
        row(*range(1, 8)),
        [media(4, 2, "image", 1)],
        2,
    ),
    "an item is not cut in two": (
        [
            (
                row(*range(1, 9)),
                [normal(8)],
                {},
                [media(1, 2, "image", 1), media(5, 2, "audio", 2), media(6, 3, "image", 3)],
            )
        ],
        row(*range(1, 10)),
        [media(1, 2, "image", 1), media(5, 2, "audio", 2), media(6, 3, "image", 3)],
        5,
    ),
    "a picture that differs ends the match where it begins": (
        [(row(*range(1, 11)), [normal(10)], {}, IMAGES)],
        row(*range(1, 11)),
        [IMAGES[0], media(6, 2, "image", 99)],
        6,
    ),
    "no token in common": ([(row(1, 2), [normal(2)], {}, [])], row(2, 2), [], 0),
}
