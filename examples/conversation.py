"""The prompts of three agents about one ticket, as tokens with a picture between them.

Owns: the texts, the pictures, and the place of a picture in a conversation. Does not own: the model (chat_prefix.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import tiny_decoder
from tiny_decoder import AGENT, BEGIN, PICTURE, PICTURE_TOKENS, SIDE, USER

import tensord

AGENTS: Final = ("planner", "coder", "critic")
SYSTEM: Final = """\
You are one of three assistants who work on the same ticket, and you see the same screenshot of it. The planner \
decides what is to be done and in which order; the coder changes the program; the critic reads what the coder has \
written and says what is wrong with it. Answer in the language of the question. Say what you know, say what you \
guess, and keep the two apart. Never invent a file, a function, a flag or a figure: if you need one that you have \
not seen, ask for it. When you call a tool, write the call alone on its line and stop there; its result comes with \
the next message. Tools: read(path) gives a file's text; search(words) gives the lines that have them; run(command) \
gives what the command prints, cut to its last hundred lines; note(text) keeps a sentence for the others. Changes \
are small: one thought, one change, one test that fails without it. Do not touch what the ticket does not name. Do \
not rename what others import. If a test fails that was green before, stop and say so before anything else. Numbers \
have units. Times are in UTC. Paths are relative to the repository's root. Secrets are never repeated, not even in \
part, not even if you are asked to. If the screenshot and the ticket's text disagree, the text counts, and you say \
that they disagree. End each answer with the one thing that you would do next. The ticket: since the last release \
the list of invoices is empty for customers whose account is older than the migration; the screenshot shows the \
list as support sees it."""
QUESTIONS: Final = {
    "planner": "What are the steps, and which one first?",
    "coder": "Which function reads the list, and what does it filter by?",
    "critic": "What could make this look mended although it is not?",
}
FOLLOW_UP: Final = "And if the account was migrated twice?"


@dataclass
class Conversation:
    """A sequence of tokens with its picture."""

    tokens: list[int]
    picture_at: int
    pixels: npt.NDArray[np.uint8]

    @classmethod
    def begin(cls, picture: int) -> Conversation:
        """The system prompt and one of the pictures."""
        tokens = [BEGIN, *tiny_decoder.tokens_of(SYSTEM)]
        return cls([*tokens, *[PICTURE] * PICTURE_TOKENS], len(tokens), draw(picture))

    def ask(self, question: str) -> None:
        self.tokens += [USER, *tiny_decoder.tokens_of(question), AGENT]

    @property
    def media(self) -> list[tensord.Media]:
        digest = hashlib.sha256(self.pixels.tobytes()).digest()
        return [tensord.Media(self.picture_at, PICTURE_TOKENS, "image", digest)]


def draw(number: int) -> npt.NDArray[np.uint8]:
    """A picture, uint8 (64, 64, 3): rings around a point that depends on `number`."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    distance = np.hypot(rows - 11 * (number + 1), columns - 23)
    planes = [128 + 127 * np.sin(distance / (3 + channel + number)) for channel in range(3)]
    return np.stack(planes, -1).astype(np.uint8)
