"""What the tests of gauges share: stand-in libraries, compiled once, and the cards that they show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from .cards import Begin, Cards, Reader, compiled


@pytest.fixture(scope="session")
def nvml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For LD_LIBRARY_PATH."""
    return compiled("nvml.c", tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1").parent


@pytest.fixture(scope="session")
def rocm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For ROCM_PATH."""
    return compiled("amdsmi.c", tmp_path_factory.mktemp("rocm") / "lib/libamd_smi.so").parent.parent


@pytest.fixture(scope="session")
def old_rocm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For ROCM_PATH: a library that lists GPUs by socket only."""
    library = tmp_path_factory.mktemp("rocm-old") / "lib/libamd_smi.so"
    return compiled("amdsmi.c", library, "-DWITHOUT_BY_TYPE").parent.parent


@pytest.fixture
def cards(tmp_path: Path) -> Cards:
    """No cards yet, and no driver before they are shown."""
    return Cards(tmp_path / "cards")


@pytest.fixture
def begun() -> Iterator[Begin]:
    """Begins a Reader, which ends with the test."""
    with ExitStack() as ends:
        yield lambda *arguments, **environ: ends.enter_context(Reader(*arguments, **environ))
