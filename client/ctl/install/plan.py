"""What to do to install the service's files, or to remove them, as a list of steps.

Owns: which file is written, kept or removed; and carrying out a step. Does not own: the files' texts (files.py).

A file is the operator's if it is neither as the record says nor as this release has it. It is kept, and this release's
text is written beside it as NAME.new. The record has the digest of each text that was last installed.

Invariants: `installation` and `removal` change nothing. The text of a step says all that it does.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import click

NEW: Final = ".new"
_FILE_MODE: Final = 0o644
_RUN_S_MAX: Final = 120.0


class PlannedStep(NamedTuple):
    """One step. `carry_out` raises a ClickException if a program failed, and OSError if a file cannot be changed."""

    says: str
    carry_out: Callable[[], object]


def write(path: Path, text: str) -> PlannedStep:
    """Writes a file of mode 0644, and the folders above it."""
    return PlannedStep(f"write {path}", partial(_write, path, text))


def keep(path: Path, why: str) -> PlannedStep:
    """Leaves a file as it is."""
    return PlannedStep(f"keep {path}: {why}", lambda: None)


def remove(path: Path) -> PlannedStep:
    """Removes a file."""
    return PlannedStep(f"remove {path}", partial(path.unlink, missing_ok=True))


def remove_folder(path: Path) -> PlannedStep:
    """Removes a folder that is empty."""
    return PlannedStep(f"remove {path}, if it is empty", partial(_remove_folder, path))


def run(*words: str, may_fail: bool = False) -> PlannedStep:
    """Runs a program, which must succeed unless `may_fail`."""
    return PlannedStep("run " + " ".join(words), partial(_run, words, may_fail=may_fail))


def installation(texts: Mapping[Path, str], record: Path) -> list[PlannedStep]:
    """The steps that put `texts` in place."""
    installed = recorded(record)
    steps: list[PlannedStep] = []
    for path, text in texts.items():
        there, digest = _read(path), _digest(text)
        beside = path.with_name(path.name + NEW)
        if there == text:
            # A file that the operator has brought up to date by hand.
            steps += _unchanged(beside, installed)
        elif there is None or _digest(there) == installed.get(path):
            steps.append(write(path, text))
        elif installed.get(path) == digest:
            steps.append(keep(path, "it was changed here"))
        else:
            steps.append(keep(path, f"it was changed here; {beside.name} has the text of this release"))
            steps.append(write(beside, text))
            installed[beside] = digest
        installed[path] = digest
    for path in list(installed):
        if path not in texts and path.with_name(path.name.removesuffix(NEW)) not in texts:
            steps += _unchanged(path, installed)  # of a release before
    known = {str(path): digest for path, digest in sorted(installed.items())}
    text = json.dumps(known, indent=2) + "\n"
    return steps if _read(record) == text else [*steps, write(record, text)]


def removal(record: Path, own_folders: Sequence[Path]) -> list[PlannedStep]:
    """The steps that remove what the record names and nobody has changed."""
    steps: list[PlannedStep] = []
    for path, digest in recorded(record).items():
        there = _read(path)
        if there is not None:
            changed = _digest(there) != digest
            steps.append(keep(path, "it was changed here; remove it by hand") if changed else remove(path))
    return [*steps, remove(record), *map(remove_folder, own_folders)]


def recorded(record: Path) -> dict[Path, str]:
    """The digest of every installed file; empty if nothing was installed.

    Raises:
        click.ClickException: the record is damaged.
    """
    text = _read(record)
    if text is None:
        return {}
    try:
        return {Path(str(path)): str(digest) for path, digest in json.loads(text).items()}
    except (ValueError, AttributeError):
        raise click.ClickException(
            f"{record} is not the record of an installation: remove it, and run `tensorctl install` again"
        ) from None


def _unchanged(path: Path, installed: dict[Path, str]) -> list[PlannedStep]:
    """Removes a file that is no longer needed, if it is as it was installed; from the record in any case."""
    digest, there = installed.pop(path, None), _read(path)
    return [remove(path)] if there is not None and _digest(there) == digest else []


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), _FILE_MODE)
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


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


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
