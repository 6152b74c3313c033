"""Reports of inference requests, from which the daemon computes the queueing floor.

Owns: the checks of the reports. Does not own: the floor (the daemon's).
Invariants: a report is sent once, without waiting. Reports without a daemon are dropped, since they concern the last
minute only.
"""

from __future__ import annotations

from ...ipc.messages import control as messages
from ...ipc.messages.governance import ARRIVALS_MAX, DEVICE_BLOCKS_MAX
from ..arguments.checks import check_count, check_name, check_seconds
from .modes import GovernorListener


def arrived(governor: GovernorListener, device: str, count: int) -> None:
    """See `Client.request_arrived`."""
    check_name("device", device)
    count = check_count("count", count, ARRIVALS_MAX)
    if count:
        governor.tell(messages.RequestsArrived(device, count))


def completed(governor: GovernorListener, device: str, service_s: float, blocks: int) -> None:
    """See `Client.request_completed`."""
    check_name("device", device)
    served_s = check_seconds("service_s", service_s)
    governor.tell(messages.RequestCompleted(device, served_s, check_count("blocks", blocks, DEVICE_BLOCKS_MAX)))
