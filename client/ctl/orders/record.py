"""`record`: writes the requests that the daemon serves from now on to a file.

Owns: the file's format, and the hashing of keys. Does not own: the events.

The file has JSON lines. The first is a header with `tensord_requests`, the version of the format. Each other line is a
request: seconds since the first one, the key's hash, the hash of its namespace, the bytes of the payload, its tokens,
and 1 if the entry was stored already, else 0. The hashes are keyed by a random number that is not kept. So a file tells
neither keys nor contents, and two files cannot be compared.
"""

from __future__ import annotations

import json
import lzma
import secrets
import time
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Final

import click

from ....errors import TensordError
from ....ipc.messages.control import Watch
from ..daemon import Daemon, pass_daemon
from ..output import counted
from ..parameters import DURATION, FILE, TAG_BYTES

VERSION: Final = 1
REQUESTS_MAX: Final = 10_000_000
_HASH_BYTES: Final = 8


class Recording:
    """The lines of a file."""

    def __init__(self) -> None:
        self._hash = partial(blake2b, digest_size=_HASH_BYTES, key=secrets.token_bytes(16))
        self._began_s: float | None = None
        self.dropped = 0

    def header(self, status: dict[str, Any]) -> str:
        """The first line. Facts of the daemon that matter for a replay, and none that names the host or its users."""
        figures = {name: status["store"][name] for name in ("policy", "max_bytes", "max_entries")}
        return json.dumps({"tensord_requests": VERSION, "version": status["version"], **figures}) + "\n"

    def line(self, row: list[Any], at_s: float) -> str:
        """A request's line. `at_s`: seconds of a clock that never goes back."""
        if self._began_s is None:
            self._began_s = at_s
        key, size_bytes, tokens, stored = row
        digits = bytes.fromhex(key)
        hashes = [self._hash(part).hexdigest() for part in (digits, digits[:TAG_BYTES])]
        return json.dumps([round(at_s - self._began_s, 3), *hashes, size_bytes, tokens, int(stored)]) + "\n"

    def requests(self, daemon: Daemon, for_s: float | None) -> Iterator[str]:
        """The lines of the requests from now on."""
        ends_s = None if for_s is None else time.monotonic() + for_s
        events = daemon.events(lambda number: Watch(number, requests=True), ends_s)
        click.echo("recording; Ctrl-C ends it", err=True)
        for event in events:
            self.dropped += event.dropped
            at_s = time.monotonic()
            for row in event.body["rows"]:
                yield self.line(row, at_s)


@click.command()
@click.argument("file", type=FILE)
@click.option("--for", "for_s", type=DURATION, metavar="TIME", help="End after this time. Default: at Ctrl-C.")
@click.option(
    "-n",
    "--count",
    type=click.IntRange(1, REQUESTS_MAX),
    default=1_000_000,
    show_default=True,
    metavar="N",
    help="End after N requests.",
)
@pass_daemon
def record(daemon: Daemon, file: Path, for_s: float | None, count: int) -> None:
    """Writes the requests that the daemon serves from now on to a new FILE, until Ctrl-C.

    A request is a use of a stored entry, or a put of a new one. Keys are hashed. A FILE that ends in .xz is compressed.
    benchmarks/replay.py replays it. The daemon records nothing while this command does not run.
    """
    recording, written = Recording(), 0
    # Before the file is made: without a daemon there is nothing to record.
    header = recording.header(daemon.status())
    try:
        with _created(file) as lines:
            lines.write(header)
            try:
                for line in recording.requests(daemon, for_s):
                    lines.write(line)
                    written += 1
                    if written == count:
                        break
            except KeyboardInterrupt:
                pass
    except OSError as error:
        if isinstance(error, TensordError):  # TimedOut is an OSError, too
            raise
        raise click.ClickException(f"{file} is incomplete, it cannot be written any more: {error.strerror}") from None
    click.echo(f"{counted(written, 'request', 'requests')} in {file}")
    if recording.dropped:
        lost = counted(recording.dropped, "event of up to 256 requests was", "events of up to 256 requests each were")
        click.echo(f"tensorctl: {lost} lost: they came faster than they were written", err=True)


def _created(file: Path) -> IO[str]:
    try:
        return lzma.open(file, "xt") if file.suffix == ".xz" else file.open("x")
    except FileExistsError:
        raise click.UsageError(f"{file} exists already: remove it, or name another file") from None
    except OSError as error:
        raise click.UsageError(f"{file} cannot be made ({error.strerror}): name a file in a folder of yours") from None
