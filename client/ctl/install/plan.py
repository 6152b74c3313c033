"""What to do to install the service's files, or to remove them, as a list of steps.

Owns: which file is written, kept or removed; and carrying out a step. Does not own: the files' texts (files.py).

The units are the package's: they are written anew, and changed by `systemctl edit`, which keeps a file of its own. The
configuration file is the operator's: one that is there is kept.

Invariants: `installation` and `removal` change nothing. The text of a step says all that it does.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import click

_RUN_S_MAX: Final = 120.0


class PlannedStep(NamedTuple):
    """One step. `carry_out` raises a ClickException if a program failed, and OSError if a file cannot be changed."""

    says: str
    carry_out: Callable[[], object]


def run(*words: str, may_fail: bool = False) -> PlannedStep:
    """Runs a program, which must succeed unless `may_fail`."""
    return PlannedStep("run " + " ".join(words), partial(_run, words, may_fail=may_fail))


def installation(texts: Mapping[Path, str], config: Path) -> list[PlannedStep]:
    """The steps that put `texts` in place. `config`: the one that is the operator's."""
    return [
        PlannedStep(f"write {path}", partial(_write, path, text))
        for path, text in texts.items()
        if not (path.exists() if path == config else _is(path, text))
    ]


def removal(texts: Mapping[Path, str], config: Path) -> list[PlannedStep]:
    """The steps that remove what `installation` has put in place, except a configuration file that was changed."""
    steps = [
        PlannedStep(f"keep {path}: it was changed here; remove it by hand", lambda: None)
        if path == config and not _is(path, text)
        else PlannedStep(f"remove {path}", partial(path.unlink, missing_ok=True))
        for path, text in texts.items()
        if path.exists()
    ]
    folder = config.parent
    return [*steps, PlannedStep(f"remove {folder}, if it is empty", partial(_remove_folder, folder))]


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8", errors="surrogateescape") == text


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o644)


def _remove_folder(path: Path) -> None:
    with suppress(OSError):
        path.rmdir()


def _run(words: Sequence[str], *, may_fail: bool) -> None:
    # TENSORD_* variables of whoever installs are not the service's.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TENSORD_")}
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_RUN_S_MAX, env=environ
        )
        said = f"ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip() or 'it said nothing'}"
        failed = done.returncode != 0
    except (OSError, subprocess.TimeoutExpired) as error:
        said, failed = str(error), True
    if failed and not may_fail:
        raise click.ClickException(f"{' '.join(words)}: {said}; mend it, and run this command again")
