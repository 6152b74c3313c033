"""Stand-ins for vLLM, Ollama and ComfyUI: their documented HTTP interface, and bytes on a fake card.

Each runs in threads of the test, on a port of loopback. What it frees, the card's gauge shows, and nothing else does.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self

from tensord.testing import FakeCard

GIB: Final = 1 << 30


class StandIn:
    """A server. Use it in a `with`.

    Args:
        holds: its bytes on the card at the beginning, under a handle of its own.
    """

    kind: str

    def __init__(self, card: FakeCard, holds: int) -> None:
        self.card = FakeCard(card.folder, card.name)
        self.card.occupy(holds)
        self.requests: list[tuple[str, str, Any]] = []
        self.frees = True
        """False: it answers that it frees, and does not."""
        self.instead: Callable[[BaseHTTPRequestHandler], object] | None = None
        """What it does in place of answering."""
        self.released = threading.Event()
        """Set at the end: who hangs ends."""
        self.later: threading.Timer | None = None
        """What it does after its answer."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.port: int = self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"{self.kind}=http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"{self.kind} 127.0.0.1:{self.port}"

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        raise NotImplementedError

    def free(self) -> None:
        if self.frees:
            self.card.occupy(0)

    @property
    def paths(self) -> list[str]:
        return [f"{method} {path}" for method, path, _ in self.requests]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        if self.later is not None:
            self.later.join()
        self.card.close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                size_bytes = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(size_bytes)) if size_bytes else None
                stand_in.requests.append((self.command, self.path, body))
                if stand_in.instead is not None:
                    self.close_connection = True
                    stand_in.instead(self)
                    return
                status, answer = stand_in.answer(self.command, self.path, body)
                told = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(told)))
                self.end_headers()
                self.wfile.write(told)

            do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


class StandInOllama(StandIn):
    """Ollama with two models on the card, and one in the host's memory."""

    kind = "ollama"

    def __init__(self, card: FakeCard, holds: int) -> None:
        self.models = {"llama3:8b": holds // 2, "qwen3:4b": holds - holds // 2, "in-ram": 0}
        super().__init__(card, holds)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        match method, path:
            case "GET", "/api/ps":
                more = {"size": 4 * GIB, "details": {"family": "llama"}}
                models = [{"name": name, "size_vram": held, **more} for name, held in self.models.items()]
                return 200, {"models": models}
            case "POST", "/api/generate" if body.get("keep_alive") == 0 and not body.get("prompt"):
                if body["model"] not in self.models:
                    return 404, {"error": f"model '{body['model']}' not found"}
                if self.frees:
                    del self.models[body["model"]]
                    self.card.occupy(sum(self.models.values()))
                return 200, {"model": body["model"], "response": "", "done": True, "done_reason": "unload"}
        return 404, "404 page not found"


class StandInComfy(StandIn):
    """ComfyUI, with `running` prompts. It frees after it has answered, as its worker does."""

    kind = "comfyui"

    def __init__(self, card: FakeCard, holds: int) -> None:
        self.running = 0
        super().__init__(card, holds)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        match method, path:
            case "GET", "/queue":
                prompts = [
                    [number, f"id-{number}", {"3": {"class_type": "KSampler"}}] for number in range(self.running)
                ]
                return 200, {"queue_running": prompts[:1], "queue_pending": prompts[1:]}
            case "POST", "/free" if body == {"unload_models": True, "free_memory": True}:
                self.later = threading.Timer(0.1, self.free)
                self.later.start()
                return 200, ""
        return 404, ""


class StandInVllm(StandIn):
    """vLLM's server with --enable-sleep-mode; `dev_mode`: VLLM_SERVER_DEV_MODE. `metrics`: in place of its own."""

    kind = "vllm"

    def __init__(self, card: FakeCard, holds: int, *, dev_mode: bool = True) -> None:
        self.running = self.waiting = 0
        self.dev_mode = dev_mode
        self.sleeps = False
        self.metrics = ""
        super().__init__(card, holds)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        match method, path:
            case "GET", "/metrics":
                labels = '{engine="0",model_name="tiny, {or} not"}'
                return 200, self.metrics or (
                    "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
                    "# TYPE vllm:num_requests_running gauge\n"
                    f"vllm:num_requests_running{labels} {float(self.running)}\n"
                    f"vllm:num_requests_waiting{labels} {float(self.waiting)}\n"
                    f"vllm:num_requests_waiting_by_reason{labels} 7.0\n"
                )
            case "GET", "/is_sleeping" if self.dev_mode:
                return 200, {"is_sleeping": self.sleeps}
            case "POST", "/sleep?level=1" if self.dev_mode:
                self.sleeps = True
                self.free()
                return 200, ""
        return 404, {"detail": "Not Found"}


# ---- what a server may do instead

Misdeed = Callable[[BaseHTTPRequestHandler, StandIn], object]


def hang(handler: BaseHTTPRequestHandler, stand_in: StandIn) -> None:
    """It takes the request, and never answers."""
    stand_in.released.wait()


def drip(handler: BaseHTTPRequestHandler, stand_in: StandIn) -> None:
    """It sends a byte now and then, and never ends."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while not stand_in.released.wait(0.02):
        handler.wfile.write(b" ")


def die(handler: BaseHTTPRequestHandler, stand_in: StandIn) -> None:
    """It ends in the middle of its answer, and with it its memory."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Le")
    handler.wfile.flush()
    stand_in.card.occupy(0)


def flood(handler: BaseHTTPRequestHandler, stand_in: StandIn) -> None:
    """Its answer never ends, as fast as it is read."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    while not stand_in.released.is_set():
        handler.wfile.write(chunk)


def cut_off(handler: BaseHTTPRequestHandler, stand_in: StandIn) -> None:
    """It closes the connection in the middle of an answer that would be whole."""
    status, answer = stand_in.answer(handler.command, handler.path, None)
    told = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
    handler.wfile.write(b"HTTP/1.1 %d OK\r\nContent-Length: %d\r\n\r\n" % (status, len(told) + 7) + told)


def instead(answer: bytes) -> Misdeed:
    """It answers so, without a body."""
    return lambda handler, stand_in: handler.wfile.write(answer + b"\r\nContent-Length: 0\r\n\r\n")
