"""A governor with everything around it played by the test: clients, gauges, the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from tensord.daemon.forms.effects import Announce, HostHolds, Send
from tensord.daemon.forms.events import AgentsTurned, ClientLeft, Pressed, Tick
from tensord.daemon.governor.forms.events import (
    AskNeighbour,
    Effect,
    Event,
    Governed,
    GovernorClientJoined,
    GovernorLimitsChanged,
    GovernorLog,
    Sample,
    Sampled,
)
from tensord.daemon.governor.forms.limits import GovernorLimits
from tensord.daemon.governor.governor import Governor
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.modes import HOST_GAUGE, Mode, Tier

from ..checked import Checked

GPU = "0000:65:00.0"
OTHER = "0000:66:00.0"
MIB = 1 << 20
TOTAL = 1000 * MIB


SHARES = {Mode.RELAXED: 0.5, Mode.NORMAL: 0.75, Mode.PRESSURE: 0.87, Mode.CRITICAL: 0.93, Mode.EMERGENCY: 0.97}
"""A share of a gauge in each mode."""


def key(number: int) -> bytes:
    return number.to_bytes(8, "little") * 4


def named(orders: Sequence[messages.Order], *kinds: str) -> list[int]:
    """The numbers of the entries that orders name, in their order."""
    keys = [each for order in orders if not kinds or order.kind in kinds for each in order.keys]
    return [int.from_bytes(each[:8], "little") for each in keys]


class Stand(Checked):
    """Time passes only as the test says."""

    def __init__(self, **limits: Any) -> None:
        super().__init__()
        self.limits = GovernorLimits(**limits)
        self.governor = Governor(self.limits)
        self.now = 100.0
        self.answers: dict[int, list[Any]] = {}
        self.pressed: list[Pressed] = []
        self.told: list[dict[str, Any]] = []
        self.logged: list[GovernorLog] = []
        self.neighbours_asked: list[AskNeighbour] = []
        self.turned: list[AgentsTurned] = []
        self.gauges: dict[str, Sample] = {}
        self.given: list[tuple[int, messages.Order]] = []
        self.done: set[int] = set()
        self._requests = 0
        self._came = 0

    def do(self, event: Event) -> list[Effect]:
        effects = self.governor.handle(event, self.now)
        for effect in effects:
            match effect:
                case Send(client, message):
                    assert client in self.answers, "an answer to a client that left"
                    self.answers[client].append(message)
                    if isinstance(message, messages.Order):
                        self.given.append((client, message))
                case Pressed():
                    self.pressed.append(effect)
                case AgentsTurned():
                    self.turned.append(effect)
                case Announce(body):
                    self.told.append(body)
                case GovernorLog():
                    self.logged.append(effect)
                case AskNeighbour():
                    self.neighbours_asked.append(effect)
        return effects

    def join(self, *clients: int) -> None:
        for client in clients:
            self.answers[client] = []
            self.do(GovernorClientJoined(client, f"client {client}", 4000 + client))

    def leave(self, client: int) -> None:
        del self.answers[client]
        self.do(ClientLeft(client))

    def say(self, client: int, message: Any) -> None:
        self.do(Governed(client, message))

    def begin(self, client: int, make: Callable[..., Any], *args: Any, **more: Any) -> int:
        self._requests += 1
        self.say(client, make(self._requests, *args, **more))
        return self._requests

    def answer(self, client: int, request: int) -> Any:
        """The answer to a request; None if there is none yet."""
        found = [each for each in self.answers[client] if getattr(each, "id", None) == request]
        assert len(found) <= 1, "answered twice"
        return found[0] if found else None

    def ask(self, client: int, make: Callable[..., Any], *args: Any, **more: Any) -> Any:
        answer = self.answer(client, self.begin(client, make, *args, **more))
        assert answer is not None, "no answer"
        return answer

    def pass_time(self, seconds: float) -> None:
        """Time passes; Ticks come when they are due."""
        end = self.now + seconds
        self.settle()
        while (timer := self.governor.next_timer()) is not None and timer <= end:
            self.now = max(self.now, timer)
            self.settle()
        self.now = end

    def settle(self) -> None:
        for _ in range(10_000):
            timer = self.governor.next_timer()
            if timer is None or timer > self.now:
                return
            self.do(Tick())
        raise AssertionError("there is always another Tick due")

    def change_limits(self, **limits: Any) -> None:
        self.limits = replace(self.limits, **limits)
        self.do(GovernorLimitsChanged(self.limits))

    def sample(
        self,
        used: float,
        gauge: str = GPU,
        total: int = TOTAL,
        *,
        after_s: float = 1.0,
        began_at: float | None = None,
        source: str = "test",
        stale: bool = False,
        **shown: Any,
    ) -> None:
        """All gauges are read, `after_s` later; this one shows `used`: bytes, or a share."""
        self.now += after_s
        began_at = self.now if began_at is None else began_at
        used_bytes = used if isinstance(used, int) else round(used * total)
        tier = Tier.HOST if gauge == HOST_GAUGE else Tier.DEVICE
        self.gauges = {name: structs.replace(sample, began_at=began_at) for name, sample in self.gauges.items()}
        self.gauges[gauge] = Sample(gauge, tier, used_bytes, total, source, began_at, stale, shown)
        self.do(Sampled(tuple(self.gauges.values())))
        self.settle()

    def lose(self, gauge: str = GPU) -> None:
        """The gauge is not among those that are read any more."""
        self.now += 1
        del self.gauges[gauge]
        self.gauges = {name: structs.replace(sample, began_at=self.now) for name, sample in self.gauges.items()}
        self.do(Sampled(tuple(self.gauges.values())))
        self.settle()

    def mode(self, gauge: str = GPU) -> Mode:
        return next(tier.mode for tier in self.governor.modes() if tier.gauge == gauge)

    def holds(self, resident: int, wanted: int, *, settled: bool = True) -> None:
        self.do(HostHolds(resident, wanted, settled))

    @property
    def press(self) -> Pressed:
        return self.pressed[-1] if self.pressed else Pressed()

    def open(self, *clients: int, device: str = GPU) -> None:
        for client in clients:
            answer = self.ask(client, messages.OpenDevice, device)
            assert isinstance(answer, messages.DeviceOpened), answer

    def register(self, client: int, number: int, size: int = MIB, tokens: int = 1, **more: Any) -> Any:
        device = more.pop("device", GPU)
        more.setdefault("new_bytes", size)
        return self.ask(client, messages.RegisterEntry, device, key(number), size, tokens, **more)

    def use(self, client: int, *numbers: int) -> None:
        self.say(client, messages.UseEntries(GPU, [key(each) for each in numbers]))

    def release(self, client: int, *numbers: int) -> int:
        return int(self.ask(client, messages.ReleaseEntries, GPU, [key(each) for each in numbers]).count)

    def reserve(self, client: int, mib: int, for_s: float = 10.0, **more: Any) -> Any:
        return self.ask(client, messages.ReserveDevice, GPU, mib * MIB, for_s, **more)

    def orders(self, client: int | None = None, *kinds: str) -> list[messages.Order]:
        """Every order that was given, oldest first."""
        return [order for to, order in self.given if client in (None, to) and (not kinds or order.kind in kinds)]

    def came(self, *kinds: str) -> list[int]:
        """The entries that orders have named since the last call."""
        before, self._came = self._came, len(self.given)
        return named([order for _, order in self.given[before:]], *kinds)

    def reading(self, used: float, total: int = 100, **more: Any) -> list[int]:
        """The gauge is read; the entries that are ordered away for it, or asked back."""
        self.came()
        self.sample(used, total=total, **more)
        return self.came()

    def carry_out(self, client: int, order: messages.Order, freed_bytes: int = 1, keep: bool = False) -> Any:
        what = "kept" if keep else {"offload": "offloaded", "drop": "dropped"}[order.kind]
        said: dict[str, Any] = {what: order.keys, "freed_bytes": freed_bytes}
        return self.ask(client, messages.AcknowledgeOrder, order.device, order.order, **said)

    def carry_out_all(self, freed_bytes: int = 0, keep: bool = False) -> None:
        """Every open order is acknowledged, with so many bytes for each entry."""
        for client, order in self.given:
            if client in self.answers and order.kind != "promote" and order.order not in self.done:
                self.done.add(order.order)
                self.carry_out(client, order, freed_bytes * len(order.keys), keep)

    def enter(self, mode: Mode, total: int = 100) -> None:
        """The gauge is read once in this mode. What is ordered for it stays in use."""
        self.sample(SHARES[mode], total=total)
        self.carry_out_all(keep=True)
        self.came()
        assert self.mode() is mode

    def serve_requests(self) -> None:
        """A minute with requests that need a floor of 10 blocks."""
        for _ in range(60):
            self.now += 1
            self.say(2, messages.RequestsArrived(GPU, 1))
            self.say(2, messages.RequestCompleted(GPU, 2.0, 4))

    def status(self) -> dict[str, Any]:
        return self.governor.status()

    def device(self, name: str = GPU) -> dict[str, Any]:
        row: dict[str, Any] = next(row for row in self.status()["devices"] if row["device"] == name)
        return row

    def pushes(self, client: int) -> list[messages.ModeChanged]:
        return [answer for answer in self.answers[client] if isinstance(answer, messages.ModeChanged)]

    def check(self) -> None:
        self.governor.check_invariants()


def with_clients(**limits: Any) -> Stand:
    """Clients 1, 2 and 3 are there from the start."""
    stand = Stand(**limits)
    stand.join(1, 2, 3)
    return stand


def card(count: int = 0, size: int = 10, **limits: Any) -> Stand:
    """All three have opened it. Entries 1 to `count` are client 1's, registered a second apart."""
    stand = with_clients(**{"pass_share": 1.0, **limits})
    stand.open(1, 2, 3)
    for each in range(1, count + 1):
        stand.register(1, each, size)
        stand.now += 1
    return stand


def refused(answer: Any, code: str) -> str:
    assert isinstance(answer, messages.Error), f"not refused: {answer}"
    assert answer.code == code, answer
    return answer.text
