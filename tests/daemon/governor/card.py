"""A card with idle entries on it, for which processes reserve memory."""

from __future__ import annotations

from typing import Any

from tensord.ipc.messages import control as messages

from .stand import GPU, MIB, Make


class Card:
    """A card of TOTAL bytes: others hold `others` MiB, and client 1 has three idle entries of 100 MiB on it."""

    def __init__(self, make: Make, others: int = 500, **limits: Any) -> None:
        self.stand = make(**limits)
        self.others = others
        self.stand.open(1, 2)
        for number in (1, 2, 3):
            self.stand.register(1, number, 100 * MIB, tokens=0)
        self.sample()
        self.requests = 100

    @property
    def held(self) -> int:
        """MiB of entries."""
        return int(self.stand.device()["bytes"] // MIB)

    def sample(self, **more: Any) -> None:
        self.stand.sample((self.others + self.held) * MIB, **{"after_s": 0.25, **more})

    def reserve(self, client: int, size: int, wait_s: float = 5.0, device: str = GPU) -> int:
        """Asks for MiB; returns the request's number."""
        self.requests += 1
        message = messages.ReserveDevice(self.requests, device, size * MIB, 30.0, wait_s)
        self.stand.say(client, message)
        self.stand.settle()
        return self.requests

    def answer(self, client: int, request: int) -> Any:
        found = [each for each in self.stand.answers[client] if getattr(each, "id", None) == request]
        assert len(found) <= 1, "answered twice"
        return found[0] if found else None

    def carry_out(self, freed: int = 100) -> None:
        """All open orders are acknowledged, each entry with `freed` MiB."""
        self.stand.carry_out_all(freed * MIB)

    def ordered(self) -> list[bytes]:
        return [each for order in self.stand.orders(None, "offload", "drop") for each in order.keys]
