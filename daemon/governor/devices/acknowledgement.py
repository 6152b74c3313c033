"""Processes acknowledgements of orders, and their absence: entries are gone, remembered, kept, or resident again.

Owns how an acknowledgement changes the table, the pass, the memory of offloaded entries, and the counters; and how a
missed deadline does. Does not own whether an acknowledgement is valid, nor when an owner is late (`DeviceOrders`).

Invariant: every row of an acknowledgement leaves its order.
"""

from __future__ import annotations

import numpy as np

from ....ipc.messages import control as messages
from ..forms.outbox import GovernorOutbox
from .copies import CopyRates
from .orders import DeviceOrders, OpenOrder
from .promotion import Promotions
from .record import Owner
from .table import ORDERED, Rows, exact_sum


def carry_out(
    order: OpenOrder,
    rows: Rows,
    message: messages.AcknowledgeOrder,
    orders: DeviceOrders,
    promotions: Promotions,
    copies: CopyRates,
    outbox: GovernorOutbox,
    kept_until: float,
    now: float,
) -> None:
    """Processes an acknowledgement. `rows`: one for each key offloaded, dropped, kept, all of them under the order."""
    device, table, counters = order.device, order.device.table, outbox.counters
    gone = len(message.offloaded) + len(message.dropped)
    offloaded, dropped, kept = np.split(rows, [len(message.offloaded), gone])
    offloaded_bytes = exact_sum(table.size_bytes[offloaded])
    copies.copied(device.name, offloaded_bytes, message.copy_s, now)
    counters.offloaded += len(offloaded)
    counters.offloaded_bytes += offloaded_bytes
    if len(offloaded):
        outbox.offload_took(order.owner.client, now - order.sent_at, offloaded_bytes)
    counters.dropped += len(dropped)
    counters.dropped_bytes += exact_sum(table.size_bytes[dropped])
    counters.kept += len(kept)
    counters.freed_bytes += message.freed_bytes
    if order.part_of is not None:
        order.part_of.left += gone
        if gone:
            order.part_of.left_of.add(order.owner.client)
        order.part_of.freed_bytes += message.freed_bytes
    device.freed_by_driver(message.freed_bytes, now)
    if message.freed_bytes:
        order.owner.vain_s = 0.0
    promotions.remembered.add(device.name, order.owner.client, table, offloaded, now)
    orders.detach(device, rows, now)
    table.remove(rows[:gone])
    # Kept entries are in use. If their owner was late, they are resident already.
    table.take_back(kept[table.state[kept] == ORDERED], kept_until)
    table.not_before[kept] = kept_until
    device.coldest.thaw(kept_until)


def take_back(owner: Owner, rows: Rows, outbox: GovernorOutbox, until: float) -> None:
    """Makes the rows of a late owner resident again: they are not known to be gone. They are not ordered before
    `until`."""
    device = owner.device
    device.table.take_back(rows, until)
    outbox.counters.timed_out += len(rows)
    if owner.unresponsive:
        return
    owner.unresponsive = True
    client = outbox.clients.get(owner.client)
    outbox.announce("owner", client=owner.client, device=device.name, unresponsive=True)
    outbox.log(
        "warning",
        "owner does not answer",
        client=owner.client,
        name=client.name if client else "",
        pid=client.pid if client else 0,
        device=device.name,
        entries=len(rows),
    )
