"""The load of one_card.py: the requests of three programs on one card, from midnight to midnight, from one seed.

Owns: the sizes, and when each program is asked for what. Does not own: the programs (card_programs.py).

All sizes are those of a card of 80 GB, divided by 1,280. All three programs together would like to keep 99 MiB.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

MIB: Final = 1 << 20
CARD: Final = "card0"
CARD_BYTES: Final = 64 * MIB
HOURS: Final = 24
SEED: Final = 7

# The chat engine: its weights and KV, its adapters, and the encoder's outputs of pictures.
BASELINE_BYTES: Final = 24 * MIB
ADAPTER_BYTES: Final = MIB
ADAPTERS: Final = 4
PICTURES: Final = 150
ENCODER_BYTES: Final = MIB
# The image generation: its working memory.
JOB_BYTES: Final = 20 * MIB
JOB_HOURS: Final = 0.5
JOBS_AT: Final = (3.2, 10.3, 11.4, 14.4, 15.3, 16.2, 21.1)

# An entry is the encoder's output of a picture, or the KV of a part of a session.
ENTRY_BYTES: Final = MIB // 2
ENTRY_TOKENS: Final = 1000
# The time that computing an entry takes, as the daemon's defaults for 1,000 tokens: docs/pressure.md, "Modes".
PICTURE_MS: Final = 100.0
BLOCK_MS: Final = 60.0
# The size that each program would give its cache if it had the card for itself.
CHAT_ENTRIES: Final = 48
CODER_ENTRIES: Final = 52

SESSIONS: Final = 5
SESSION_BLOCKS: Final = 12


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A question about a picture, for a model with an adapter. `at`: the hour, with its fraction."""

    at: float
    picture: int
    adapter: int


@dataclass(frozen=True, slots=True)
class CodingTurn:
    """A turn of a coding session: it needs all `blocks` of the session so far, and adds one."""

    at: float
    session: int
    blocks: int


@dataclass(frozen=True, slots=True)
class ImageJob:
    """A batch of images: it needs JOB_BYTES for JOB_HOURS."""

    at: float
    number: int


def chat_day() -> list[ChatRequest]:
    """Few requests at night, the most before noon and in the afternoon. A few pictures are asked for often."""
    chance = np.random.default_rng(SEED)
    popularity = 1 / np.arange(1, PICTURES + 1) ** 0.8
    popularity /= popularity.sum()
    return [
        ChatRequest(at, int(chance.choice(PICTURES, p=popularity)), int(chance.integers(ADAPTERS)))
        for at in _times(chance, lambda hour: 6 + 40 * _peak(hour, 11, 1.8) + 36 * _peak(hour, 15.5, 2))
    ]


def coder_day() -> list[CodingTurn]:
    """Turns of several sessions, which the agent leaves and comes back to. A full session is followed by a new one."""
    chance = np.random.default_rng(SEED + 1)
    blocks = dict.fromkeys(range(SESSIONS), 0)
    turns = []
    for at in _times(chance, lambda hour: 1 + 16 * _peak(hour, 10.5, 2) + 16 * _peak(hour, 15.5, 2.5)):
        session = list(blocks)[int(chance.integers(SESSIONS))]
        turns.append(CodingTurn(at, session, blocks[session]))
        blocks[session] += 1
        if blocks[session] == SESSION_BLOCKS:
            del blocks[session]
            blocks[max([session, *blocks]) + 1] = 0
    return turns


def image_day() -> list[ImageJob]:
    """A few jobs, most of them while the other programs have the most to do."""
    return [ImageJob(at, number) for number, at in enumerate(JOBS_AT)]


def content(name: str) -> np.ndarray[Any, Any]:
    """The content of an entry, which every process can compute."""
    seed = int.from_bytes(hashlib.sha256(f"{SEED}/{name}".encode()).digest()[:8], "little")
    return np.frombuffer(np.random.default_rng(seed).bytes(ENTRY_BYTES), np.uint8)


def _peak(hour: float, at: float, width: float) -> float:
    return math.exp(-(((hour - at) / width) ** 2))


def _times(chance: np.random.Generator, rate: Any) -> list[float]:
    """Times of a Poisson process whose rate changes from hour to hour."""
    return [hour + part for hour in range(HOURS) for part in sorted(chance.random(chance.poisson(rate(hour + 0.5))))]
