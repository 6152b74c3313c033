"""Runs every benchmark and example once, in a short form, to show that each works. The figures mean nothing.

    python benchmarks/smoke.py [NAMES]

Owns: the list of commands with their short forms, and the tiny trace for the replay. A command with an unexpected exit
status is a failure: smoke.py prints its output and exits with 1.
"""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
# The environment with vLLM, which `make bench-peers` installs.
PEERS_PYTHON: Final = ROOT / ".venv-peers" / "bin" / "python"
# Not a measurement: a command that takes longer hangs.
PATIENCE_S: Final = 300
AT_ONCE: Final = 2
TRACE: Final = "mooncake_conversation_trace.jsonl.xz"


@dataclass(frozen=True, slots=True)
class Command:
    """One command. `with_vllm`: it runs in the environment with vLLM, and is skipped if there is none.

    `statuses`: the exit statuses of a correct run.
    """

    script: str
    arguments: tuple[str, ...] = ()
    with_vllm: bool = False
    statuses: tuple[int, ...] = (0,)


COMMANDS: Final = (
    Command("examples/shared_vision.py", ("--processes", "2", "--passes", "1")),
    Command("examples/pressure.py"),
    Command("examples/chat_prefix.py"),
    Command("examples/cluster.py"),
    Command("benchmarks/hotpath.py", ("--quick", "--sizes", "64K,1M")),
    Command("benchmarks/put_shapes.py", ("--seconds", "0.05")),
    Command("benchmarks/prefix.py", ("--sequences", "200", "--client-sequences", "20", "--rounds", "1")),
    Command("benchmarks/remote.py", ("--quick",)),
    Command("benchmarks/recovery_cost.py", ("--entries", "2000", "--blocks", "4")),
    Command("benchmarks/soak.py", ("--minutes", "0.1")),
    Command(
        "benchmarks/replay.py",
        ("--traces", "{folder}", "--jobs", "1", "--sizes", "5,20", "--only", "conversation,fresh-in-full"),
    ),
    # Exit status 2: this machine has no GPU.
    Command("benchmarks/gpu_check.py", ("--entries", "2", "--entry-bytes", "1048576"), statuses=(0, 2)),
    Command("examples/shared_kv.py", with_vllm=True),
    Command("examples/cluster_engines.py", with_vllm=True),
    Command("benchmarks/processor_cache.py", ("--quick",), with_vllm=True),
    Command("benchmarks/vllm_kv.py", ("--quick",), with_vllm=True),
    Command("benchmarks/vllm_text.py", ("--rounds", "2", "--tokens", "4", "--pictures", "2"), with_vllm=True),
)


def write_trace(folder: Path) -> None:
    """A conversation trace of 200 requests: 20 chats that grow by a block a turn."""
    requests = (
        {
            "timestamp": number * 1000,
            "input_length": 512 * (2 + number // 20),
            "output_length": 1,
            "hash_ids": [0, *(1000 * (number % 20 + 1) + turn for turn in range(1 + number // 20))],
        }
        for number in range(200)
    )
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    (folder / TRACE).write_bytes(lzma.compress(lines.encode()))


def run(command: Command, folder: Path) -> str:
    """Runs one command. Returns its output if it failed, else an empty string."""
    arguments = [argument.format(folder=folder) for argument in command.arguments]
    python = str(PEERS_PYTHON) if command.with_vllm else sys.executable
    try:
        done = subprocess.run(
            [python, str(ROOT / command.script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            cwd=folder,
        )
    except subprocess.TimeoutExpired as error:
        return f"{error.output or ''}\ndid not end within {PATIENCE_S} s\n"
    return "" if done.returncode in command.statuses else f"{done.stdout}\nexit status {done.returncode}\n"


def told_of(command: Command, folder: Path) -> tuple[Command, str, str]:
    """Runs one command, if it can be run here. Returns it, what became of it, and its output if it failed."""
    if command.with_vllm and not PEERS_PYTHON.exists():
        return command, "skipped: vLLM is missing; `make bench-peers` installs it", ""
    began = time.monotonic()
    output = run(command, folder)
    return command, f"{'FAILED' if output else 'ran'} in {time.monotonic() - began:.0f} s", output


def main(names: list[str], commands: tuple[Command, ...] = COMMANDS) -> int:
    """Runs the commands whose script names contain one of `names`, or all.

    Returns:
        The exit status: 1 if a command failed, 2 if a name matches no script.
    """
    if unknown := [name for name in names if not any(name in command.script for command in commands)]:
        print(
            f"no script's name contains {', '.join(map(repr, unknown))}; choose from "
            f"{', '.join(Path(command.script).stem for command in commands)}",
            file=sys.stderr,
        )
        return 2
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="tensord-smoke-") as made:
        write_trace(Path(made))
        chosen = [each for each in commands if not names or any(name in each.script for name in names)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for command, told, output in pool.map(lambda each: told_of(each, Path(made)), chosen):
                print(f"{command.script:34} {told}", flush=True)
                if output:
                    failures[command.script] = output
    for script, output in failures.items():
        print(f"\n{script}:\n{output}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
