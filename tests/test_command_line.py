"""The long runs of `make` refuse numbers that mean nothing, and leave nothing behind when a signal ends them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator
from multiprocessing import Pipe, get_context
from pathlib import Path

import pytest

from .command_line import minutes, new_file, whole
from .daemon_process import PATIENCE_S, until
from .simulation import simulate

ROOT = Path(__file__).parents[1]
SOAK = (str(ROOT / "benchmarks" / "soak.py"),)
CROSSINGS, CRASHES, FUZZ, SIMULATE = (
    ("-m", name) for name in ("tests.crossings", "tests.crashes", "tests.fuzz.fuzz", "tests.simulation.simulate")
)
SENSELESS = [
    (CROSSINGS, "--rounds", "0"),
    (CROSSINGS, "--round", "-1"),
    (CROSSINGS, "--only", "nosuch"),
    (CRASHES, "--kills", "-3"),
    (CRASHES, "--at", "-1"),
    (SIMULATE, "--seeds", "0"),
    (SIMULATE, "--seed", "-1"),
    (FUZZ, "--minutes", "nan"),
    (FUZZ, "--first", ""),
    (SOAK, "--minutes", "0"),
    (SOAK, "--json", "/nonexistent/x.json"),
]
LONG = {
    "soak": (*SOAK, "--minutes", "5"),
    "crossings": (*CROSSINGS, "--rounds", "9"),
    "crashes": (*CRASHES, "--kills", "9999"),
    "fuzz": (*FUZZ, "--minutes", "5"),
    "simulate": (*SIMULATE, "--seeds", "999999"),
}


@pytest.mark.parametrize(("program", "option", "value"), SENSELESS, ids=str)
def test_a_number_that_means_nothing_is_refused_by_its_value(program: tuple[str, ...], option: str, value: str) -> None:
    ended = subprocess.run(
        [sys.executable, *program, option, value], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ended.returncode == 2, ended
    told = ended.stderr.splitlines()[-1]
    assert (value or "''") in told
    assert "give" in told or "such as" in told


def test_numbers_without_a_sense_are_refused_and_others_taken(tmp_path: Path) -> None:
    for text in ("0", "-1", "", "abc", "1.5", "nan", "1" * 30):
        with pytest.raises(ArgumentTypeError):
            whole(1)(text)
    for text in ("0", "-1", "", "abc", "nan", "inf", "1e300"):
        with pytest.raises(ArgumentTypeError):
            minutes(text)
    for text in ("", "/nonexistent/x", str(tmp_path), "/dev/null/x"):
        with pytest.raises(ArgumentTypeError):
            new_file(text)
    assert (whole(0)("0"), minutes("0.5"), new_file(f"{tmp_path}/x")) == (0, 0.5, tmp_path / "x")


def marked(mark: str) -> list[int]:
    """The processes that have `mark` in their environment: those that a run has started, and theirs."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


@pytest.mark.parametrize(
    ("name", "number"), [*((name, signal.SIGTERM) for name in LONG), ("crossings", signal.SIGINT)], ids=str
)
def test_a_signal_leaves_no_process_memory_or_folder_of_a_run(tmp_path: Path, name: str, number: int) -> None:
    mark = f"TEST_OF_SIGNALS={os.getpid()}-{name}-{number}"
    before = set(Path("/dev/shm").iterdir())
    environ = {**os.environ, "TMPDIR": str(tmp_path), **dict([mark.split("=")])}
    run = subprocess.Popen(
        [sys.executable, *LONG[name]],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until(lambda: len(marked(mark)) >= 3, "the run to have begun")
        if name != "simulate":
            until(lambda: list(tmp_path.glob("tensord*/control.sock")), "a daemon of the run's")
        pids = {str(pid) for pid in marked(mark)}
        # As `timeout` does it: to the process, and to all of its group.
        run.send_signal(number)
        os.killpg(run.pid, number)
        assert run.wait(PATIENCE_S)
        until(lambda: not marked(mark), "its processes to end")
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("pymp-")] == []
    names = [path.name for path in set(Path("/dev/shm").iterdir()) - before]
    assert [name for name in names if pids & set(re.split("[-.]", name))] == []


def test_a_process_of_a_simulation_that_a_signal_ends_takes_no_other_seeds() -> None:
    """Also where the signal comes within a finalizer, in which an exception would be lost."""
    reader, writer = Pipe(duplex=False)

    def seeds() -> Iterator[int]:
        class Finalized:
            def __del__(self) -> None:
                os.kill(os.getpid(), signal.SIGTERM)

        Finalized()
        yield from range(1_000_000)

    process = get_context("fork").Process(target=simulate.work, args=(seeds(), 100, writer, [reader]))
    process.start()
    writer.close()
    with reader:
        assert reader.recv()[0] == 0
        with pytest.raises(EOFError):
            reader.recv()
    process.join()
    assert process.exitcode == 0


def test_a_simulation_tells_of_a_process_that_ended_by_itself_and_runs_the_seeds_of_the_others() -> None:
    script = """
import os
from tests.simulation import simulate
run_seed = simulate.run_seed
simulate.run_seed = lambda seed, steps: os._exit(3) if seed == 4 else run_seed(seed, steps)
raise SystemExit(simulate.main(["--seeds", "8", "--steps", "20", "--jobs", "2"]))
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert "seed 4 FAILED: its process ended, with status 3; 1 further seeds were not run" in run.stdout
    assert (run.returncode, run.stderr) == (1, "")
    assert "1 of 8 seeds failed: [4]" in run.stdout


def test_the_processes_of_a_simulation_end_with_it_also_where_it_is_killed() -> None:
    mark = f"TEST_OF_KILLS={os.getpid()}"
    environ = {**os.environ, **dict([mark.split("=")])}
    run = subprocess.Popen([sys.executable, *LONG["simulate"], "--jobs", "3"], cwd=ROOT, env=environ)
    try:
        until(lambda: len(marked(mark)) >= 4, "its processes")
        run.kill()
        run.wait()
        until(lambda: not marked(mark), "its processes to end")
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


WHERE_ERRORS_ARE_LOST = {
    "a finalizer": "class F:\n    __del__ = lambda self: told()\nF()",
    "what sends the signal again": """\
start, late_s = command_line.start_new_thread, [0.1]
command_line.start_new_thread = lambda *thread: (start(*thread), time.sleep(late_s.pop() if late_s else 0))
class F:
    __del__ = lambda self: told()
F()""",
    "a weak reference's callback": "class F: pass\nf = F(); r = weakref.ref(f, lambda _: told()); del f",
    "the parent's hook of a fork": "os.register_at_fork(after_in_parent=told)\nif not os.fork(): os._exit(0)",
    "the child's hook of a fork": "os.register_at_fork(after_in_child=told)\nif pid := os.fork(): own_child(pid)",
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
@pytest.mark.parametrize("where", WHERE_ERRORS_ARE_LOST)
def test_a_signal_ends_a_run_also_where_its_exception_is_lost(where: str, number: int) -> None:
    """`timeout` sends it twice."""
    script = f"""
import os, signal, time, weakref
from tests import command_line
def told(*_):
    os.kill(os.getpid(), {number})
    os.kill(os.getpid(), {number})
def own_child(pid):
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
command_line.end_cleanly()
try:
{"".join(f"    {line}{chr(10)}" for line in WHERE_ERRORS_ARE_LOST[where].splitlines())}
    while True:
        time.sleep(0.05)
finally:
    print("cleared up", flush=True)
"""
    # Python 3.12 and newer warn of a fork beside threads.
    words = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (run.returncode, run.stdout, run.stderr) == (128 + number, "cleared up\n", "")


@pytest.mark.parametrize("when", ["before", "after_in_parent", "after_in_child"])
def test_a_signal_while_the_processes_of_a_simulation_are_forked_ends_them_all(when: str) -> None:
    script = (
        "import os, signal\n"
        "from tests.command_line import end_cleanly\n"
        "from tests.simulation import simulate\n"
        "end_cleanly()\n"
        f"os.register_at_fork({when}=lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
        "raise SystemExit(simulate.main(['--seeds', '999999', '--jobs', '2']))"
    )
    mark = f"TEST_OF_FORKS={os.getpid()}-{when}"
    run = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env={**os.environ, **dict([mark.split("=")])})
    try:
        assert run.wait(PATIENCE_S)
        until(lambda: not marked(mark), "its processes to end")
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


def test_daemons_whose_tests_were_killed_free_their_memory(tmp_path: Path) -> None:
    script = "from tests.daemon_process import Daemon; d = Daemon(); d.start(); print(d.instance, flush=True); input()"
    run = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None and run.stdin is not None
    with run.stdin, run.stdout:
        instance = run.stdout.readline().strip()
        assert instance
        run.kill()
        run.wait()
    until(lambda: not list(Path("/dev/shm").glob(f"tensord.{instance}.*")), "its daemon to free its memory")
