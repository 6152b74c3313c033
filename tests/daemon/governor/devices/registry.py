"""A device registry with everything around it played by the test: clients, gauges, workflows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensord.daemon.core.effects import Announce, Send
from tensord.daemon.governor.devices.circumstances import Circumstances
from tensord.daemon.governor.devices.devices import Devices
from tensord.daemon.governor.forms.effects import GovernorLog
from tensord.daemon.governor.forms.limits import GovernorLimits
from tensord.daemon.governor.forms.outbox import GovernorClient, GovernorOutbox
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.modes import Mode
from tensord.ipc.messages.schema import SIZE_BYTES_MAX

GPU = "0000:65:00.0"
FINISHED = 2e9
UNKNOWN = 1e9
UNREAD = Circumstances(Mode.RELAXED, 0, SIZE_BYTES_MAX, float("-inf"), host_accepts=True)
"""How a device stands that no gauge shows."""


def key(number: int) -> bytes:
    """A key that is told from others by its number, and ends in zeros as any key may."""
    return number.to_bytes(8, "little") + bytes(24)


def number(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


class Workflows:
    """What workflows say of agents."""

    def __init__(self) -> None:
        self.steps: dict[str, float] = {}

    def set(self, **steps: float) -> None:
        self.steps = steps

    def distance(self, agent: str) -> float:
        return self.steps.get(agent, UNKNOWN)

    def up_next(self, lookahead: int) -> Sequence[str]:
        near = sorted((steps, agent) for agent, steps in self.steps.items() if steps <= lookahead)
        return [agent for _, agent in near]


class Registry:
    """Clients 1, 2 and 3 have opened the device. Time passes only as the test says."""

    def __init__(self, **limits: Any) -> None:
        self.limits = GovernorLimits(**{"block_bytes": 1, **limits})
        self.outbox = GovernorOutbox()
        self.workflows = Workflows()
        self.devices = Devices(self.limits, self.outbox, self.workflows)
        self.now = 1000.0
        self.orders: list[tuple[int, messages.Order]] = []
        self.told: list[dict[str, Any]] = []
        self.logged: list[GovernorLog] = []
        self.join(1, 2, 3)

    @property
    def counters(self) -> dict[str, Any]:
        return self.outbox.counters.as_dict()

    def join(self, *clients: int) -> None:
        for client in clients:
            self.outbox.clients[client] = GovernorClient(f"client {client}", client)
            self.devices.open(client, GPU)

    def leave(self, client: int) -> None:
        del self.outbox.clients[client]
        self.devices.client_left(client, self.now)

    def register(
        self, client: int, which: int, size: int = 10, tokens: int = 1, under: Circumstances = UNREAD, **more: Any
    ) -> messages.Registered:
        message = messages.RegisterEntry(which, GPU, key(which), size, tokens, **more)
        try:
            return self.devices.register(client, message, under, self.now)
        finally:
            self.take()

    def use(self, client: int, *which: int) -> None:
        self.devices.use(client, messages.UseEntries(GPU, [key(each) for each in which]), self.now)

    def release(self, client: int, *which: int) -> int:
        return self.devices.release(client, messages.ReleaseEntries(1, GPU, [key(each) for each in which]), self.now)

    def acknowledge(
        self,
        client: int,
        order: int,
        *,
        offloaded: Sequence[bytes] = (),
        dropped: Sequence[bytes] = (),
        kept: Sequence[bytes] = (),
        freed: int = 0,
    ) -> None:
        message = messages.AcknowledgeOrder(1, GPU, order, list(offloaded), list(dropped), list(kept), freed)
        self.devices.acknowledge(client, message, self.now)
        self.take()

    def carry_out(self, *, freed: int = 0, keep: bool = False) -> None:
        """Every order that came is acknowledged by whoever got it."""
        orders, self.orders = self.orders, []
        for client, order in orders:
            if order.kind == "promote":
                continue
            what = "kept" if keep else {"offload": "offloaded", "drop": "dropped"}[order.kind]
            said: dict[str, Any] = {what: order.keys}
            self.acknowledge(client, order.order, freed=freed, **said)

    def stands(self, used: int, total: int = 100, mode: Mode = Mode.PRESSURE, **more: Any) -> Circumstances:
        more = {"host_accepts": True, "began_at": self.now, **more}
        return Circumstances(mode=mode, used_bytes=used, total_bytes=total, **more)

    def sample(self, used: int, total: int = 100, mode: Mode = Mode.PRESSURE, **more: Any) -> list[messages.Order]:
        """A second passes, and the gauge is read; the orders that follow."""
        self.now += 1
        self.devices.sampled(GPU, self.stands(used, total, mode, **more), self.now)
        return self.settle()

    def settle(self) -> list[messages.Order]:
        """Ticks until nothing is put off; the orders that came."""
        before = len(self.orders)
        self.take()
        for _ in range(10_000):
            timer = self.devices.next_timer()
            if timer is None or timer > self.now:
                return [order for _, order in self.orders[before:]]
            self.devices.tick(self.now)
            self.take()
        raise AssertionError("there is always another tick due")

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    def take(self) -> None:
        for effect in self.outbox.take():
            match effect:
                case Send(client, messages.Order() as order):
                    self.orders.append((client, order))
                case Announce(body):
                    self.told.append(body)
                case GovernorLog():
                    self.logged.append(effect)

    @property
    def status(self) -> dict[str, Any]:
        (row,) = self.devices.status()
        return row

    def snapshot(self) -> Any:
        """All that is shown of the registry."""
        return self.devices.status(), self.devices.owners(), self.counters


def ordered(orders: Sequence[messages.Order], *kinds: str) -> list[int]:
    """The entries that orders name, in their order."""
    return [number(each) for order in orders if not kinds or order.kind in kinds for each in order.keys]
