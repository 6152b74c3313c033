"""GPUs for tests: libraries compiled from standins/, the cards that they show, and a process that reads them."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import pytest

from tensord.daemon.gauges.reading import GaugeFailed, Result, Source

from ...daemon_process import until
from .conformance import Stage

STANDINS: Final = Path(__file__).with_name("standins")
READER: Final = Path(__file__).with_name("reader.py")
GIB: Final = 1 << 30


def compiled(source: str, library: Path, *flags: str) -> Path:
    """A shared library of one of the stand-ins."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: apt-get install gcc")
    library.parent.mkdir(parents=True, exist_ok=True)
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
    named = f"-Wl,-soname,{library.name}"
    subprocess.run(
        [compiler, "-shared", "-fPIC", *warnings, *flags, named, "-o", library, STANDINS / source], check=True
    )
    return library


@dataclass
class Card:
    """One card, as a library shows it. `error`: what reading its memory answers instead.

    `mig`: 1 in MIG mode, 0 out of it, -1 for a card that has none. `slice_of`: the index of the card of which this is a
    MIG slice, with `bus` in its UUID.
    """

    used_bytes: int
    total_bytes: int = 80 * GIB
    error: int = 0
    domain: int = 0
    bus: int = 0x65
    device: int = 0
    function: int = 0
    gtt_used_bytes: int = 0
    gtt_total_bytes: int = 0
    mig: int = -1
    slice_of: int = -1

    def line(self) -> str:
        place = f"{self.domain:x} {self.bus:x} {self.device:x} {self.function:x}"
        gtt = f"{self.gtt_used_bytes} {self.gtt_total_bytes}"
        return f"{self.error} {self.used_bytes} {self.total_bytes} {place} {gtt} {self.mig} {self.slice_of}\n"


@dataclass
class Cards:
    """All cards, in the file that the stand-ins read."""

    file: Path
    cards: list[Card] = field(default_factory=list)
    generation: int = 1

    def show(self, *cards: Card) -> None:
        """From now on these are there, or else they are as they are said to be here."""
        self.cards = list(cards) or self.cards
        beside = self.file.with_suffix(".new")
        beside.write_text(f"{self.generation}\n" + "".join(card.line() for card in self.cards))
        beside.rename(self.file)

    def hide(self) -> None:
        """There is no driver any more."""
        self.file.unlink()


class Hang:
    """The file that tells a stand-in which call hangs ($STANDIN_HANG): "open", "count", "address 0", "read 1" ..."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._there = Path(f"{file}.at")

    def begin(self, *calls: str) -> None:
        """From now on these calls do not return."""
        self._there.unlink(missing_ok=True)
        beside = Path(f"{self._file}.new")
        beside.write_text("\n".join(calls))
        beside.rename(self._file)

    def until_there(self) -> None:
        """Waits until a call hangs."""
        until(self._there.exists, "a call to hang")

    def end(self) -> None:
        """The call returns, and no other one hangs."""
        self._file.unlink(missing_ok=True)


class Reader(Source):
    """A source in a process of its own. Use it in a `with`."""

    name = "reader"

    def __init__(self, source: str, *arguments: Path, **environ: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(READER), source, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environ},
        )
        self._now = 0.0

    def read(self, now: float) -> Result:
        self._now = now
        return self._ask(now)

    def close(self) -> None:
        """Closes the source; the process goes on."""
        self._ask(None)

    def _ask(self, now: float | None) -> Result:
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump(now, self._process.stdin)
        self._process.stdin.flush()
        try:
            answer: Result | GaugeFailed = pickle.load(self._process.stdout)
        except EOFError:
            raise AssertionError(f"the reader ended: {self._process.communicate()[1]!r}") from None
        if isinstance(answer, GaugeFailed):
            raise answer
        return answer

    def gauges(self, later_s: float = 2.0) -> dict[str, Any]:
        """Reads, `later_s` after it last did; by gauge: [used, total], or why not."""
        read = self.read(self._now + later_s).items()
        return {
            name: str(got) if isinstance(got, GaugeFailed) else [got.used_bytes, got.total_bytes] for name, got in read
        }

    def failed(self, later_s: float = 2.0) -> GaugeFailed:
        """Reads likewise; why there is nothing to read."""
        with pytest.raises(GaugeFailed) as raised:
            self.read(self._now + later_s)
        return raised.value

    def end(self) -> str:
        """Ends it in good order, and gives what went to its standard error."""
        _, said = self._process.communicate(timeout=60)
        assert self._process.returncode == 0, said
        return said.decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
            self._process.communicate()


Begin = Callable[..., Reader]


class OneCard(Stage):
    """A vendor's library that lists one card, which it may fail to read."""

    gauge = "0000:65:00.0"
    ERROR: Final = 15

    def __init__(self, cards: Cards, reader: Reader) -> None:
        self.cards = cards
        self.source = reader

    def show(self, used_bytes: int, total_bytes: int) -> None:
        self.cards.show(Card(used_bytes, total_bytes))

    def lose(self) -> None:
        self.cards.cards[0].error = self.ERROR
        self.cards.show()
