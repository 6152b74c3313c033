"""Calls about memory pressure, for asyncio: modes, workflows, inference requests and reservations of device memory.

Does not own: subscriptions of an event loop (async_subscription.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ....ipc.steps import AgentStepGraph
from ..async_subscription import AsyncSubscription
from ..device_reservation import DeviceReservation
from ..governor import ModeChange, TierState
from ..workflow import Workflow
from .base import AsyncClientBase


class AsyncPressureCalls(AsyncClientBase):
    """The calls of `AsyncClient` for engines that share devices and the host's memory."""

    async def on_mode(
        self, callback: Callable[[ModeChange], object] | None = None, gauge: str | None = None
    ) -> AsyncSubscription:
        """As `Client.on_mode`. The event loop runs `callback`, which may be a coroutine function; or iterate over the
        result.

        `callback` is called until the result or this client is closed, or the loop ends.
        """
        subscription = await AsyncSubscription().open(self._client, callback, gauge)
        self._subscriptions.add(subscription)
        return subscription

    async def modes(self) -> dict[str, TierState]:
        """Returns how full each tier is, in bytes: a device by its name, the ring by "host".

        Raises:
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        return await asyncio.to_thread(self._client.modes)

    async def workflow(self, name: str, graph: AgentStepGraph) -> Workflow:
        """Tells the daemon which agents run in which order, until `Workflow.end`. Use the result in a `with`.

        Without a daemon, sends the graph once there is one.

        Raises:
            UsageError: `name` is no valid name.
            BadGraph: the steps cannot be run in any order, or another client has a workflow of this name.
            LimitReached: workflows_max or workflow_steps_max.
        """
        return await asyncio.to_thread(self._client.workflow, name, graph)

    async def request_arrived(self, device: str, count: int = 1) -> None:
        """Reports `count` new inference requests, for the queueing floor of `device`. Without a daemon, does nothing.

        Raises:
            UsageError: a value is out of its range; the message names it.
        """
        self._client.request_arrived(device, count)

    async def request_completed(self, device: str, service_s: float, blocks: int) -> None:
        """Reports an inference request served in `service_s` seconds. Without a daemon, does nothing.

        Args:
            blocks: blocks of the device's cache that the request used, of `queueing.block_bytes` bytes each.

        Raises:
            UsageError: a value is out of its range; the message names it.
        """
        self._client.request_completed(device, service_s, blocks)

    async def reserve_device(
        self, device: str, size_bytes: int, for_s: float = 30.0, *, timeout_s: float | None = None
    ) -> DeviceReservation:
        """Reserves `size_bytes` of a device's free memory against other processes. Allocates nothing.

        Use the result in a `with`, and allocate in it.

        Args:
            for_s: seconds until the reservation ends by itself; the daemon may set a lower limit.
            timeout_s: seconds to wait for the daemon's answer.

        Raises:
            UsageError: a value is out of its range.
            DeviceFull: less is free; the message says how much.
            NoGauge: nothing measures how full the device is, or its gauge cannot be read now.
            LimitReached: reservations_max.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        return await asyncio.to_thread(self._client.reserve_device, device, size_bytes, for_s, timeout_s=timeout_s)
