"""Calls about memory pressure, for asyncio: modes, workflows, inference requests and reservations of device memory.

Does not own: subscriptions of an event loop (async_subscription.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ....ipc.steps import AgentStepGraph
from ..aside import later
from ..async_subscription import AsyncSubscription
from ..device_reservation import DeviceReservation
from ..governor import ModeChange, TierState
from ..workflow import Workflow
from .base import AsyncClientBase
from .threads import in_thread


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
        return await in_thread(self._client.modes)

    async def workflow(self, name: str, graph: AgentStepGraph) -> Workflow:
        """Tells the daemon which agents run in which order, until `Workflow.end`. Use the result in a `with`.

        Without a daemon, sends the graph once there is one.

        Raises:
            UsageError: `name` is no valid name.
            BadGraph: the steps cannot be run in any order, or another client has a workflow of this name.
            LimitReached: workflows_max or workflow_steps_max.
        """
        return await in_thread(self._client.workflow, name, graph)

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

    async def declare_baseline(self, device: str, size_bytes: int, *, timeout_s: float | None = None) -> None:
        """Says that this process holds `size_bytes` of a device by plan, as an engine's weights and KV cache. The
        device's modes are about the rest.

        Lasts until the client is closed, also with a new daemon; 0 ends it. The declarations of several clients add up.
        Without a daemon, sends it once there is one.

        Raises:
            UsageError: a value is out of its range.
            NoGauge: `device` is the host's gauge.
            LimitReached: as many devices as the daemon allows have a declared baseline.
        """
        await in_thread(self._client.declare_baseline, device, size_bytes, timeout_s=timeout_s)

    async def reserve_device(
        self,
        device: str,
        size_bytes: int,
        for_s: float = 30.0,
        *,
        priority: int = 0,
        wait_s: float | None = None,
        timeout_s: float | None = None,
    ) -> DeviceReservation:
        """Reserves `size_bytes` of a device's memory against other processes. Allocates nothing.

        Use the result in a `with`, and allocate in it. If less is free, the call waits, and cached entries that are not
        in use are ordered to leave the device.

        Args:
            for_s: seconds until the reservation ends by itself; the daemon may set a lower limit.
            priority: from -100 to 100. Of the reservations that wait, the highest priority is served first, then the
                first that came. Entries stay for a reservation below 0: it waits until memory is free otherwise.
            wait_s: seconds to wait until so much is free, at most `device.reserve_s_max`; 0: refused at once. Default:
                5 s, at most `timeout_s`.
            timeout_s: seconds to wait for the daemon's answer, after `wait_s`.

        Raises:
            UsageError: a value is out of its range.
            DeviceFull: less is free; the message says how much is free, cached and pinned.
            NoGauge: nothing measures how full the device is, or its gauge cannot be read now.
            LimitReached: reservations_max.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        request = self._client.device_request(device, size_bytes, for_s, priority, wait_s, timeout_s)
        try:
            return await in_thread(request.outcome)
        except asyncio.CancelledError:
            # Its thread may have the reservation by now, and nobody to give it to.
            later(request.give_up)
            raise
