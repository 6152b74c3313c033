"""Puts an idle engine to sleep while its cards are full, and wakes it up for its next request.

Owns: when the engine's core sleeps and wakes up by itself, and the requests that arrive in between. Does not own: how
it sleeps (vLLM's sleep mode, level 1: the weights go to host memory, the KV cache is dropped), nor the modes of cards.

What arrives while the core sleeps is held back in order. Before it wakes up, the memory that it needs is reserved, so
that cached tensors make room, and the engine does not wake up into a full card. docs/vllm.md says when it sleeps.

Invariants
- The core sleeps and wakes up in its own thread, between two steps, with no request in it.
- No request is lost, none overtakes another, and none reaches a core that sleeps by itself.
- A sleep or wake-up that somebody asks for wins: the core wakes up by itself only from a sleep of its own.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import torch
from vllm import envs
from vllm.device_allocator import get_mem_allocator_instance
from vllm.v1.engine import EngineCoreRequestType

from ....errors import DeviceFull, LimitReached, TensordError
from ....ipc.messages.modes import LEVELS, Mode
from ...core.client import Client
from ...gpu.gpu_name import gpu_name
from ...pressure.modes import ModeChange, Subscription
from .background import IDLE_S, Background
from .hooks import hook
from .presence import client_name
from .settings import SharedSettings

LEVEL: Final = 1
"""vLLM's level of sleep: the weights are kept in host memory."""
ROOM_S: Final = 60.0
"""The most seconds from the reservation of memory until the engine has taken it."""
ROOM_WAIT_S: Final = 5.0
# Calls that a sleeping core answers, or that decide about its sleep.
_ANSWERED: Final = frozenset({"is_sleeping", "is_scheduler_paused", "sleep", "wake_up", "pause_scheduler", "shutdown"})
_DECIDES: Final = frozenset({"sleep", "wake_up", "pause_scheduler"})
_HELD: Final = frozenset({EngineCoreRequestType.ADD, EngineCoreRequestType.ABORT, EngineCoreRequestType.UTILITY})

# What the connectors of the engine core that this process is making ask for.
_asked: Final[list[SharedSettings]] = []

_log = logging.getLogger("tensord")


def install(settings: SharedSettings) -> None:
    """Has the engine core that this process is making sleep as the settings say, if they have a mode. The scheduler's
    side of each connector calls it; the first one with a mode decides."""
    if not settings.sleep_at:
        return
    if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        _log.warning(
            "tensord: tensord.sleep_at has no effect in an engine without a process of its own "
            "(VLLM_ENABLE_V1_MULTIPROCESSING=0): it does nothing between requests"
        )
        return
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

    _asked.append(settings)
    for core in (EngineCoreProc, DPEngineCoreProc):
        hook(core, "run_busy_loop", _run_with_sleeper)


def _run_with_sleeper(run_busy_loop: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    sleeper = begun(core)
    try:
        return run_busy_loop(core, *args, **kwargs)
    finally:
        if sleeper is not None:
            sleeper.close()


def begun(core: Any) -> Sleeper | None:
    """The sleeper of an engine's core, begun; None if no connector asks for it, and with a line in the log if the
    engine cannot sleep by itself."""
    if not _asked:
        return None
    config = core.vllm_config
    settings = _asked[0]
    _asked.clear()
    cards = frozenset(name for name, _ in core.model_executor.collective_rpc(sleeping_bytes))
    if not all(cards):
        why = "its workers use no GPU"
    elif config.parallel_config.data_parallel_size > 1:
        why = "with data parallelism all engines have to sleep together"
    elif not config.model_config.enable_sleep_mode:
        why = "vLLM's sleep mode is off: start the engine with enable_sleep_mode"
    else:
        return Sleeper(core, settings, cards)
    _log.warning("tensord: this engine does not sleep by itself: %s", why)
    return None


def sleeping_bytes(worker: Any) -> tuple[str, int]:
    """The gauge's name of the worker's card, and the bytes that a sleep frees there; ("", 0) without a GPU. Runs in
    the worker. The bytes are those of the allocator of vLLM's sleep mode, for its backend "cumem"."""
    device = getattr(worker, "device", None)
    if device is None or device.type != "cuda":
        return "", 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return gpu_name(torch, torch.cuda, index), get_mem_allocator_instance().get_current_usage()


class Sleeper:
    """Decides for one engine's core. Begins with its construction. `cards`: the gauges' names of the engine's cards."""

    def __init__(self, core: Any, settings: SharedSettings, cards: frozenset[str]) -> None:
        self._core = core
        self._cards = cards
        self._sleep_at = settings.sleep_at
        self._idle_s = settings.sleep_idle_s
        # Written by the core's thread.
        self._idle_since: float | None = None
        self._asleep = False
        self._held: deque[tuple[Any, Any]] = deque()
        self._needs: Counter[str] = Counter()
        # Written by the background thread.
        self._level = 0
        self._room = ExitStack()
        self._has_room = False
        self._told_full = False
        self._subscription: Subscription | None = None
        self._handle = core._handle_client_request
        self._notify = core._notify_idle_state_callbacks
        core._handle_client_request = self.handle
        core._notify_idle_state_callbacks = self.idle
        name = client_name(core.vllm_config, "sleep")
        self._background = Background(settings.socket, name, "tensord-vllm-sleep", self._tick)
        self._background.start()
        _log.info(
            "tensord: this engine sleeps from mode %r on, after %g s without requests; cards: %s",
            *(self._sleep_at, self._idle_s, ", ".join(sorted(cards))),
        )

    def close(self) -> None:
        """Ends the thread, when the core's loop has ended. Idempotent."""
        self._background.close()

    # ---- the core's thread

    def handle(self, request_type: Any, request: Any) -> None:
        """Passes what a frontend sends to the core, or holds it back until the core is awake."""
        call = request[2] if request_type is EngineCoreRequestType.UTILITY else ""
        if self._asleep and request_type in _HELD and call not in _ANSWERED:
            self._held.append((request_type, request))
            if len(self._held) == 1:
                self._background.post(self._seek_room)
            return
        if request_type is EngineCoreRequestType.ADD:
            self._idle_since = None
        self._handle(request_type, request)
        if self._asleep and call in _DECIDES:
            _log.info("tensord: this engine's sleep is in the hands of who called %s", call)
            self._end_sleep()

    def idle(self) -> None:
        """Runs whenever the core has no work, before it waits for the next request."""
        self._notify()
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        if self._asleep:
            if self._has_room and self._held:
                began_s = time.monotonic()
                self._core.wake_up()
                took_s = time.monotonic() - began_s
                _log.info("tensord: this engine woke up in %.3f s for %d requests", took_s, len(self._held))
                self._end_sleep()
        elif self._is_due() and not self._core.is_sleeping():
            self._sleep()

    def _sleep(self) -> None:
        executor = self._core.model_executor
        # vLLM would drop its processor items, as the frontend that asks for a sleep drops its account of them. These
        # frontends do not know of the sleep.
        self._core.reset_mm_cache = lambda: None
        try:
            held = executor.collective_rpc(sleeping_bytes)
            # "keep": there are no requests to abort, and held ones are none of the scheduler's.
            self._core.sleep(LEVEL, "keep")
        except Exception:
            _log.exception("tensord: this engine could not fall asleep, and does not try again")
            self._sleep_at = ""
            if not executor.is_sleeping:
                self._core.resume_scheduler()
            return
        finally:
            del self._core.reset_mm_cache
        self._needs = Counter()
        for card, size_bytes in held:
            self._needs[card] += size_bytes
        self._has_room = False
        self._asleep = True
        _log.info("tensord: the card is full, and this engine idle: it sleeps; freed %s", dict(self._needs))

    def _end_sleep(self) -> None:
        self._asleep = False
        self._idle_since = None
        self._background.post(lambda client: self._room.close())
        while self._held:
            self._handle(*self._held.popleft())
        # The loop that called `idle` would wait for one more request before it steps.
        self._nudge()

    # ---- both threads

    def _is_due(self) -> bool:
        """Whether the engine is idle, and a card as full as `sleep_at` says."""
        since = self._idle_since
        if not self._sleep_at or since is None or self._level < LEVELS.index(Mode(self._sleep_at)):
            return False
        return time.monotonic() - since >= self._idle_s

    # ---- the background thread

    def _tick(self, client: Client) -> float:
        if self._subscription is None:
            self._subscription = client.on_mode(self._changed)
        states = self._subscription.states if client.connected else {}
        modes = [state.mode for name, state in states.items() if name in self._cards]
        self._level = max((LEVELS.index(mode) for mode in modes if mode in LEVELS), default=0)
        if self._asleep:
            if self._held:
                self._seek_room(client)
        elif self._is_due():
            self._nudge()
        return IDLE_S

    def _changed(self, change: ModeChange) -> None:
        if change.gauge in self._cards:
            self._background.post(lambda client: None)  # a tick follows each job

    def _seek_room(self, client: Client) -> None:
        """Reserves what the engine gave back, then lets the core wake up. Otherwise the next tick tries again."""
        if not self._asleep or self._has_room:
            return
        with ExitStack() as reserved:
            try:
                for card, size_bytes in self._needs.items():
                    if size_bytes:
                        reserved.enter_context(client.reserve_device(card, size_bytes, ROOM_S, wait_s=ROOM_WAIT_S))
            except (DeviceFull, LimitReached) as error:
                if not self._told_full:
                    _log.warning("tensord: this engine has requests, and waits for memory to wake up: %s", error)
                self._told_full = True
                return
            except TensordError as error:
                _log.info("tensord: this engine wakes up without a reservation: %s", error)
            self._room = reserved.pop_all()
        self._told_full = False
        self._has_room = True
        self._nudge()

    def _nudge(self) -> None:
        """Has the core's loop call `idle`."""
        self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
