"""A vLLM engine in a process of its own, and what a test tells it.

Owns: the process, its log, and what was said to it and not answered yet. One engine serves many tests, since its start
takes ten seconds. It runs in one process, in which a test can stop it in the middle of a step; or, `separate`, in the
processes that vLLM makes by default.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socket import socketpair as socket_pair
from typing import Any, Final, Self

from ..daemon_process import SHM_FOLDER
from .engine_worker import COUNTS, read_count

PROGRAM: Final = Path(__file__).with_name("engine_process.py")
# How long anything may take before a test gives up on it. No measurement: several engines may start at once.
PATIENCE_S: Final = 900.0
ROUNDING: Final = 1e-5


@dataclass(frozen=True, eq=False)
class Answer:
    """What an engine says to a request. Answers are equal if their tokens are, and all their logarithms but for
    rounding: an engine that computes other parts of a prompt at once adds in another order, which changes 1e-6."""

    tokens: list[int]
    logprobs: list[dict[str, float]]
    took_s: float = 0.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Answer):
            return NotImplemented
        mine, theirs = self._logarithms, other._logarithms
        return (
            self.tokens == other.tokens
            and mine.keys() == theirs.keys()
            and all(math.isclose(mine[at], theirs[at], rel_tol=0, abs_tol=ROUNDING) for at in mine)
        )

    @property
    def _logarithms(self) -> dict[tuple[int, str], float]:
        """By place in the answer and token."""
        return {(at, token): found for at, row in enumerate(self.logprobs) for token, found in row.items()}


def quiet_environ() -> dict[str, str]:
    """The environment of an engine on a small machine, without settings of ours and of vLLM's."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("TENSORD_", "VLLM_"))},
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else the main threads of all engines are on one core
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",  # eager anyway, but for logarithms of chances, which take 19 s to compile
    }


def kill_session(process: subprocess.Popen[Any]) -> None:
    """SIGKILL to a process that leads a session, and to all in it, waits for the leader's end, and removes the shared
    memory that vLLM made in it."""
    made = _shared_memory(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for path in made:
        path.unlink(missing_ok=True)


def _shared_memory(session: int) -> set[Path]:
    """The files of shared memory that the processes of a session map, but for those of a daemon."""
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if int((process / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                mapped = (Path(line[line.find("/") :]) for line in (process / "maps").read_text().splitlines())
                found.update(
                    path for path in mapped if path.parent == SHM_FOLDER and not path.name.startswith("tensord.")
                )
    return found


class EngineError(Exception):
    """What a command raised in the engine's process, with its traceback there."""


class Engine:
    """Starts at once, and is waited for by the first that asks it something.

    Args:
        model: the folder of `tiny_llava.write_tiny_llava`.
        log: a file for what the engine prints.
        socket: the daemon's; with it the engine has tensord's connector, without it none.
        separate: vLLM's own processes instead of one.
        settings: more of the connector's.
        environ: more of its environment.
        options: more keyword arguments of vLLM's LLM, over what the program has.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        socket: Path | None = None,
        separate: bool = False,
        settings: dict[str, Any] | None = None,
        environ: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        if socket is not None:
            options["ec_transfer_config"] = {
                "ec_connector": "TensordECConnector",
                "ec_role": "ec_both",
                "ec_connector_extra_config": {"tensord.socket": str(socket), "tensord.canary": 0, **(settings or {})},
            }
        self._log = log
        self._counts = log.with_suffix(".counts")
        self._counts.touch()
        self._counted = 0
        ours, theirs = socket_pair()
        told = {"model": str(model), "separate": separate, "engine": options}
        environ = {
            **quiet_environ(),
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(separate)),
            # Where vLLM's workers find engine_worker.
            "PYTHONPATH": os.pathsep.join([str(PROGRAM.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
            COUNTS: str(self._counts),
            **(environ or {}),
        }
        with log.open("ab") as output, theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(theirs.fileno()), json.dumps(told)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._socket = ours
        self._unread = b""
        self._up = False

    # ---- requests

    def generate(self, *pictures: int, **about: Any) -> Answer:
        """The answer to a request with these pictures, each named by a number; `about` as for the program's `add`."""
        self.begin(*pictures, **about)
        return self.result()

    def begin(self, *pictures: int, **about: Any) -> None:
        """Tells it to generate, and does not wait: `result` or `stopped` follows."""
        self.wait_up()
        self._say("generate", pictures=pictures, **about)

    def result(self) -> Answer:
        """What the request says that was begun."""
        return Answer(**self._answer())

    def add(self, *pictures: int, **about: Any) -> str:
        """Queues a request, which goes on with each `step`, and gives its name."""
        name: str = self.ask("add", pictures=pictures, **about)
        return name

    def step(self) -> dict[str, Answer]:
        """One step of the engine. Gives the requests that it ended."""
        return {name: Answer(**said) for name, said in self.ask("step").items()}

    # ---- what is seen of it

    def wait_up(self) -> None:
        """Returns when the engine answers."""
        if not self._up:
            self._answer()
            self._counted = read_count(self._counts)
            self._up = True

    def encoded(self) -> int:
        """How many pictures it encoded since it is up: what it encodes before, to measure itself, does not count."""
        self.wait_up()
        return read_count(self._counts) - self._counted

    def ask(self, command: str, **arguments: Any) -> Any:
        """The answer to any of the program's commands.

        Raises:
            EngineError: the command raised.
        """
        self.wait_up()
        self._say(command, **arguments)
        return self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        """All that it printed so far."""
        return self._log.read_text(errors="replace")

    # ---- stops

    def stop_at(self, place: str) -> None:
        """It stops the next time it comes to one of its PLACES."""
        self.ask("stop_at", place=place)

    def stopped(self) -> str:
        """Waits until it has stopped, and says where."""
        said = self._hear()
        assert "stopped" in said, f"it did not stop, and said {said}"
        place: str = said["stopped"]
        return place

    def go(self) -> None:
        """Ends a stop."""
        self._say("go")

    def close(self) -> None:
        """SIGKILL to it and all of its processes, whatever they do, and waits for its end."""
        kill_session(self._process)
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say(self, command: str, **arguments: Any) -> None:
        self._socket.sendall(json.dumps({"do": command, **arguments}).encode() + b"\n")

    def _answer(self) -> Any:
        said = self._hear()
        if "error" in said:
            raise EngineError(said["error"])
        assert "answer" in said, f"no answer, but {said}"
        return said["answer"]

    def _hear(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._socket], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the engine said nothing for {PATIENCE_S} s:\n{self._tail()}"
            more = self._socket.recv(1 << 20)
            assert more, f"the engine ended:\n{self._tail()}"
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        return said

    def _tail(self) -> str:
        return "\n".join(self.log.splitlines()[-60:])
