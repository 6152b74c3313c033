"""The synchronous client: the class that an inference process imports, with its calls about memory pressure.

Owns: the docstring of the client, and the reports of requests, which are sent once, without waiting.
Does not own: the other calls (entries, puts), nor what modes, workflows and reservations do (client/pressure).
Invariants: while the daemon is away, lookups go on, and puts end as "lost". Only calls that need an answer of the
daemon raise DaemonUnavailable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...errors import UsageError, shown
from ...ipc.messages import control as messages
from ...ipc.messages.governance import ARRIVALS_MAX, DEVICE_BLOCKS_MAX
from ...ipc.messages.schema import SIZE_BYTES_MAX
from ..arguments.checks import check_count, check_name, check_seconds, check_timeout
from ..pressure.device_reservation import RESERVE_WAIT_S, DeviceReservation, reserve
from ..pressure.modes import ModeChange, Subscription, TierState
from ..pressure.workflow import Workflow
from .puts import PutCalls

if TYPE_CHECKING:
    from ...ipc.graphs import AgentStepGraph


class Client(PutCalls):
    """A process's connection to the host's cache. Thread-safe, and usable in a forked child.

    Args:
        socket: path of the daemon's control socket. Default: $TENSORD_SOCKET, else the user's own socket, else the
            system's.
        name: the name that `tensorctl clients` shows, of 1 to 128 characters. Default: the program's name.
        timeout_s: default time limit of each call, in seconds. This and every other `timeout_s` is a number from 0 to
            ten years, or infinity for no limit; other values raise UsageError.
        attach_s: seconds that the constructor waits for the daemon's answer; without a socket it returns at once.
            Default: `timeout_s`; 0.25 s if the daemon at this socket has left this process without an answer before.
            The client attaches later, too.
        required: raise if there is no daemon. Default: every lookup is a miss until there is one, and the first client
            of a process that finds none at this socket logs a warning (logger `tensord`) with the command that starts
            one.

    `tally`: counts of what `get_or_compute` did in this client.

    Raises:
        UsageError: in this and every call, a value is out of its range; the message names it.
        BadKey, BadNamespace: in every call, a key is not 32 bytes, or a namespace is no Namespace.
        DaemonUnavailable, SocketForbidden, VersionMismatch: with `required`, the client could not attach.

    Example:
        >>> cache.put(key, {"hidden": np.zeros((576, 64), np.float32)}, tokens=576, wait=True).state
        'stored'
        >>> with cache.get(key) as lease:
        ...     lease.tree["hidden"].shape
        (576, 64)
        >>> cache.get(bytes(32)) is None
        True
    """

    def on_mode(self, callback: Callable[[ModeChange], object], gauge: str | None = None) -> Subscription:
        """Calls `callback` whenever a tier changes its mode, so that an engine can shrink caches of its own.

        One thread of this client calls all callbacks, one at a time and in order. It logs the exceptions that they
        raise. In asyncio `callback` calls `loop.call_soon_threadsafe`. It is not called for the modes at the time of
        the subscription: see `Subscription.states`. Changes that happen while the daemon is away are reported once it
        is back. The child of a fork subscribes anew.

        Args:
            gauge: a device's name, or "host" for the host's memory. Default: all gauges.

        Raises:
            UsageError: `callback` is no function, or `gauge` no valid name of a gauge.
            ProcessLimit: this process can start no thread for the callbacks.
        """
        self._attach()
        return self.governor.on_mode(callback, gauge, self.timeout_s)

    def modes(self) -> dict[str, TierState]:
        """Returns how full each tier is, in bytes: a device by its name, the ring by "host".

        The byte counts are those of the tier's last change of mode.

        Raises:
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        self._expect_answer(self.timeout_s)
        self.governor.subscribe(self.timeout_s)
        return dict(self.governor.states)

    def workflow(self, name: str, graph: AgentStepGraph) -> Workflow:
        """Tells the daemon which agents run in which order, until `Workflow.end`. Use the result in a `with`.

        Without a daemon, sends the graph once there is one.

        Raises:
            BadGraph: the steps cannot be run in any order, or another client has a workflow of this name.
            LimitReached: there are 256 workflows, or 16,384 steps of all workflows.
        """
        self._expect_answer(self.timeout_s)
        return Workflow(self.link, self.governor, name, graph, self.timeout_s)

    def request_arrived(self, device: str, count: int = 1) -> None:
        """Reports `count` new inference requests, for the queueing floor of `device`. Without a daemon, does nothing.
        Those of a device that has neither a gauge nor entries are not counted.
        """
        check_name("device", device)
        count = check_count("count", count, ARRIVALS_MAX)
        if count:
            self.governor.tell(messages.RequestsArrived(device, count))

    def request_completed(self, device: str, service_s: float, blocks: int) -> None:
        """Reports an inference request served in `service_s` seconds. Without a daemon, does nothing.

        Args:
            blocks: blocks of the device's cache that the request used, of `queueing.block_bytes` bytes each.
        """
        check_name("device", device)
        served_s, blocks = check_seconds("service_s", service_s), check_count("blocks", blocks, DEVICE_BLOCKS_MAX)
        self.governor.tell(messages.RequestCompleted(device, served_s, blocks))

    def reserve_device(
        self,
        device: str,
        size_bytes: int,
        for_s: float = 30.0,
        *,
        wait_s: float | None = None,
        timeout_s: float | None = None,
    ) -> DeviceReservation:
        """Reserves `size_bytes` of a device's memory against other processes. Allocates nothing.

        Use the result in a `with`, and allocate in it. If less is free, the call waits, and cached entries that are not
        in use are ordered to leave the device.

        Args:
            for_s: seconds until the reservation ends by itself; the daemon may set a lower limit.
            wait_s: seconds to wait until so much is free, at most 60; 0: refused at once. Default:
                5 s, at most `timeout_s`.
            timeout_s: seconds to wait for the daemon's answer, after `wait_s`.

        Raises:
            DeviceFull: less is free; the message says how much is free, cached and pinned.
            NoGauge: nothing measures how full the device is, or its gauge cannot be read now.
            LimitReached: this client has 64 reservations.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        limit_s = check_timeout(timeout_s, self.timeout_s)
        check_name("device", device)
        size_bytes = check_count("size_bytes", size_bytes, SIZE_BYTES_MAX, least=1)
        lasts_s = check_seconds("for_s", for_s, above_0=True)
        waits_s = min(RESERVE_WAIT_S, limit_s) if wait_s is None else check_seconds("wait_s", wait_s)
        self._expect_answer(limit_s)
        request = messages.ReserveDevice(0, device, size_bytes, lasts_s, waits_s)
        reservation = reserve(self.link, request, limit_s)
        reservation.hold(self.governor)
        return reservation


def check_client(client: object, field: str = "client") -> Client:
    """Returns `client`.

    Raises:
        UsageError: it is no Client.
    """
    if not isinstance(client, Client):
        raise UsageError(f"{field} is {shown(client)}; it must be a tensord.Client (of an AsyncClient, its client)")
    return client
