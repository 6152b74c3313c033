"""The fence: what it is for, shown in C, since no Python test can see a store that waits in a core's store buffer."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from tensord.shm.lanes import fence

LITMUS = Path(__file__).with_name("litmus.c")
ROUNDS = 200_000
SECONDS = 6


@pytest.fixture(scope="module")
def litmus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if platform.machine() != "x86_64":
        pytest.skip("the litmus is for x86-64")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one usable core: what one core stores it also loads, so that nothing can be seen out of order")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: apt-get install gcc")
    program = tmp_path_factory.mktemp("litmus") / "litmus"
    subprocess.run([compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-o", program, LITMUS], check=True)
    return program


def forbidden(program: Path, mode: str, rounds: int) -> tuple[int, int]:
    """How often each side missed the other's store, and in how many rounds."""
    done = subprocess.run([program, mode, str(rounds), str(SECONDS)], capture_output=True, text=True, check=True)
    seen, rounds_done = map(int, done.stdout.split())
    return seen, rounds_done


def test_without_a_fence_pins_are_missed_and_with_it_none_is(litmus: Path) -> None:
    if not fence.supported()[1]:
        pytest.skip("this kernel has no membarrier(GLOBAL_EXPEDITED)")
    missed, rounds = forbidden(litmus, "none", ROUNDS)
    if not missed:
        pytest.skip(f"the outcome that the fence forbids did not come up in {rounds} rounds on this machine")
    # A fence that does nothing would be found out some forty times.
    seen, rounds_fenced = forbidden(litmus, "membarrier", max(5_000, 40 * rounds // missed))
    assert not seen, f"{seen} pins missed in {rounds_fenced} rounds"
