"""A vLLM engine as a process of its own, which does what it is told line by line.

Run as a program, by `engine.Engine`: `engine_process.py FD OPTIONS`. FD is a socket; each line on it is a JSON
document. The process says {"answer": "up"} when the engine is up, then answers each {"do": NAME, ...} with
{"answer": ...} or {"error": TRACEBACK}. Between a command and its answer it may say {"stopped": PLACE}, if it was told
to stop there; it then takes commands in the middle of the engine's step, until one of them is "go".

Owns: the engine, what is counted in it, and the places where it can be stopped. Those are in the scheduler's and the
worker's code, so an engine that is to be stopped runs in this one process.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import not_
from typing import Any, Final

CARD: Final = "ENGINE_CARD"
"""As in engine_worker, which is imported by vLLM and not here."""
PROMPT: Final = "USER: {pictures}{text} ASSISTANT:"
PLACES: Final[dict[str, tuple[str, str, Callable[[Any], Any]]]] = {
    "hit": ("ec_connector", "has_cache_item", bool),
    "scheduled": ("ec_connector", "build_connector_meta", lambda made: made.loads),
    "deferred": ("ec_connector", "ensure_cache_available", not_),
    "matched": ("connector", "get_num_new_matched_tokens", lambda found: found[0]),
    "loading": ("connector", "build_connector_meta", lambda made: getattr(made, "load_jobs", None)),
}
"""Places where the engine can be stopped: after a method of one of the scheduler's connectors, if its result is so."""


class Talk:
    """The socket, line by line."""

    def __init__(self, descriptor: int) -> None:
        self._lines = socket.socket(fileno=descriptor).makefile("rwb")

    def say(self, **document: Any) -> None:
        self._lines.write(json.dumps(document).encode() + b"\n")
        self._lines.flush()

    def hear(self) -> dict[str, Any]:
        """The next command. Ends the process when nobody is there to give one."""
        line = self._lines.readline()
        if not line:
            os._exit(0)
        heard: dict[str, Any] = json.loads(line)
        return heard


class EngineProcess:
    """The engine and the commands: each method that begins with `do_` is one.

    Args:
        options: "model" (a folder), "separate" (vLLM's own processes instead of this one), "engine" (keyword arguments
            for vLLM's LLM that are added to those here).
    """

    def __init__(self, talk: Talk, options: dict[str, Any]) -> None:
        from vllm import LLM

        if CARD in os.environ:
            from vllm.platforms import current_platform

            # The CPU has no sleep mode. The worker has a fake card that it gives back: engine_worker.
            type(current_platform).is_sleep_mode_available = lambda platform: True
        self._talk = talk
        self._separate: bool = options["separate"]
        executor = {} if self._separate else {"distributed_executor_backend": "uni"}
        self._llm: Any = LLM(
            **{
                "model": options["model"],
                "dtype": "float32",
                "seed": 0,
                "enforce_eager": True,
                "enable_prefix_caching": False,
                "max_model_len": 256,
                "max_num_seqs": 4,
                "max_num_batched_tokens": 256,
                "limit_mm_per_prompt": {"image": 2},
                "kv_cache_memory_bytes": 64 << 20,
                "disable_log_stats": False,
                "worker_extension_cls": "engine_worker.Worker",
                **executor,
                **options["engine"],
            }
        )
        self._requests = 0
        self._computed = 0
        self._stops: set[str] = set()
        self._passed: dict[str, int] = defaultdict(int)
        self._spent_s: dict[str, list[float]] = defaultdict(list)
        if not self._separate:
            self._make_places()

    # ---- commands

    def do_generate(self, **about: Any) -> dict[str, Any]:
        """One request from its beginning to its end."""
        name = self.do_add(**about)
        started = time.perf_counter()
        while name not in (found := self.do_step()):
            pass
        return {**found[name], "took_s": time.perf_counter() - started}

    def do_add(
        self,
        pictures: list[int],
        uuids: list[str] | None = None,
        text: str = "what is this?",
        tokens: int = 8,
        likely: int = 5,
        params: dict[str, Any] | None = None,
        session: str | None = None,
    ) -> str:
        """Queues a request, whose name it gives. It goes on with each step.

        Args:
            uuids: a client's names for the pictures, which vLLM takes in place of their content's digest.
            tokens: how many the answer has.
            likely: of how many tokens, at each place of the answer, the logarithms of their chances are told.
            params: vLLM's kv_transfer_params.
            session: vLLM's session_id.
        """
        from vllm import SamplingParams

        prompt: dict[str, Any] = {"prompt": PROMPT.format(pictures="<image> " * len(pictures), text=text)}
        if pictures:
            prompt["multi_modal_data"] = {"image": [picture(number) for number in pictures]}
        if uuids:
            prompt["multi_modal_uuids"] = {"image": uuids}
        self._requests += 1
        name = f"request-{self._requests}"
        asked = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=likely or None,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        self._llm.llm_engine.add_request(name, prompt, asked, session_id=session)
        return name

    def do_step(self) -> dict[str, dict[str, Any]]:
        """One step of the engine. Gives the requests that it ended."""
        return {output.request_id: answer(output) for output in self._llm.llm_engine.step() if output.finished}

    def do_abort(self, name: str) -> None:
        self._llm.llm_engine.abort_request([name])

    def do_run(self) -> float:
        """Steps until all requests have ended. Gives the seconds that it took."""
        began = time.perf_counter()
        while self._llm.llm_engine.has_unfinished_requests():
            self.do_step()
        return time.perf_counter() - began

    def do_slow_encoder(self, seconds: float) -> None:
        """From now on each run of the encoder takes so much longer."""
        sys.modules["engine_worker"].encode_s = seconds  # type: ignore[attr-defined]

    def do_double_weights(self) -> None:
        """Doubles the encoder's parameters around vLLM's methods."""
        for name, parameter in self._core.model_executor.driver_worker.get_model().named_parameters():
            if "language_model" not in name:
                parameter.data.mul_(2)

    def do_engine(self, method: str, **arguments: Any) -> Any:
        """Calls a method of vLLM's engine. Gives its result if that is a truth value."""
        result = getattr(self._llm.llm_engine, method)(**arguments)
        return result if isinstance(result, bool) else None

    def do_sleep_and_lose_kv(self) -> None:
        """Sleeps and wakes up. The KV cache is lost, as on a GPU; on the CPU vLLM keeps it."""
        self._core.sleep(1)
        for tensor in self._core.model_executor.driver_worker.worker.model_runner.kv_caches:
            tensor.zero_()
        self._core.wake_up()

    def do_metrics(self, label: str | None = None) -> dict[str, float]:
        """vLLM's own metrics: counters and gauges by name, summed over their labels; by the values of `label`, if one
        is given."""
        found: dict[str, float] = defaultdict(float)
        for metric in self._llm.get_metrics():
            name = metric.labels.get(label) if label else metric.name
            if name and hasattr(metric, "value"):
                found[name] += metric.value
        return found

    def do_computed(self) -> int:
        """How many tokens the engine has computed so far: the sum of what its steps were scheduled."""
        return self._computed

    def do_reset_kv(self) -> bool:
        """Drops all KV, the connector's too. Whether vLLM did so."""
        return bool(self._llm.reset_prefix_cache(reset_connector=True))

    def do_held(self) -> dict[str, int]:
        """What the KV connector holds, by kind."""
        manager = self._core.scheduler.connector._manager
        held = {name: len(getattr(manager, f"_{name}")) for name in ("states", "loading", "storing")}
        return {**held, "pins": manager._pins, "bytes to put": self._kv_worker._copies.places.taken_bytes}

    def do_lose_block(self, after: int | None) -> None:
        """The KV worker finds another entry at the handle of one block, each time: of the block that it borrows after
        so many others. None: it finds every block again."""
        from msgspec.structs import replace

        from tensord.client.reading.ring_mapping import Handle

        rings = self._kv_worker._rings
        vars(rings).pop("borrow", None)
        if after is None:
            return
        borrow, seen = rings.borrow, []

        def borrowed(handle: bytes) -> Any:
            if handle not in seen:
                seen.append(handle)
            named = Handle.unpack(handle)
            if named is not None and seen.index(handle) == after:
                handle = replace(named, span_id=named.span_id + 1).pack()
            return borrow(handle)

        rings.borrow = borrowed

    @property
    def _kv_worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    def do_settle(self) -> None:
        """Steps until the KV connector holds nothing, and the daemon has all its copies of blocks."""
        from tensord import TensordError

        self.do_step()  # vLLM hands the blocks of a step over in the next one
        while any(self.do_held().values()):
            self.do_step()
            time.sleep(0.001)
        client = self._kv_worker._background.client
        if client is not None and client.connected:
            with suppress(TensordError):
                client.status()  # an answer that comes after all puts on the same connection

    def do_stop_at(self, place: str) -> None:
        """Stops at the place when it is next passed, once."""
        self._stops.add(place)

    def do_passed(self) -> dict[str, int]:
        """How often each place was passed."""
        return self._passed

    def do_spent(self) -> dict[str, list[float]]:
        """How long each call of a method of PLACES took, in seconds, by method, since this was last asked."""
        spent, self._spent_s = self._spent_s, defaultdict(list)
        return spent

    # ---- places

    def _make_places(self) -> None:
        def scheduled(output: Any) -> None:
            self._computed += output.total_num_scheduled_tokens

        self._after(self._core.scheduler, "schedule", scheduled)
        for place, (owner, method, there) in PLACES.items():
            connector = getattr(self._core.scheduler, owner)
            if connector is not None:
                self._passed[place] = 0
                self._after(connector, method, partial(self._pass_if, place, there))

    def _after(self, owner: Any, name: str, then: Callable[[Any], object]) -> None:
        method = getattr(owner, name)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            result = method(*arguments, **named)
            self._spent_s[name].append(time.perf_counter() - started)
            then(result)
            return result

        setattr(owner, name, wrapped)

    def _pass_if(self, place: str, there: Callable[[Any], Any], result: Any) -> None:
        if not there(result):
            return
        self._passed[place] += 1
        if place in self._stops:
            self._stops.remove(place)
            self._talk.say(stopped=place)
            self.obey()

    @property
    def _core(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core

    # ---- life

    def obey(self) -> None:
        """Does what it is told, until it is told "go", which has no answer."""
        while True:
            command = self._talk.hear()
            name = command.pop("do")
            if name == "go":
                return
            try:
                done = getattr(self, f"do_{name}")(**command)
            except Exception:
                self._talk.say(error=traceback.format_exc())
            else:
                self._talk.say(answer=done)


def picture(number: int) -> Any:
    """A picture that nobody else's number gives: 100 x 80 pixels of noise."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (80, 100, 3), dtype=np.uint8))


def answer(output: Any) -> dict[str, Any]:
    """What an engine says to a request: the tokens, and for each the likeliest ones with their logarithms."""
    said = output.outputs[0]
    likely = [{str(token): chance.logprob for token, chance in step.items()} for step in said.logprobs or ()]
    return {"tokens": list(said.token_ids), "logprobs": likely}


def main() -> None:
    talk = Talk(int(sys.argv[1]))
    try:
        engine = EngineProcess(talk, json.loads(sys.argv[2]))
    except Exception:
        talk.say(error=traceback.format_exc())
        return
    talk.say(answer="up")
    engine.obey()


if __name__ == "__main__":
    main()
