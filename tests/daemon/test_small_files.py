"""Small files that settings name: whatever the path is, reading ends and leaves nothing open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensord.daemon.process.small_files import BYTES_MAX, small_text


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("a folder", "Is a directory"),
        ("a pipe", "not a regular file"),
        ("a device", "not a regular file"),
        ("too large", f"more than {BYTES_MAX} bytes"),
        ("absent", "No such file"),
    ],
)
def test_a_path_that_is_no_small_file_is_refused_and_leaves_no_descriptor_open(
    what: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "given"
    match what:
        case "a folder":
            path.mkdir()
        case "a pipe":
            os.mkfifo(path)
        case "a device":
            path = Path("/dev/zero")
        case "too large":
            path.write_bytes(b"x" * (BYTES_MAX + 1))
    before = _open_at(path)

    with pytest.raises(OSError, match=why):
        small_text(path)

    assert _open_at(path) == before


def _open_at(path: Path) -> int:
    """How many descriptors of this process are of the path."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            count += os.readlink(link) == str(path)
        except FileNotFoundError:  # the one of the listing itself
            continue
    return count
