"""Converts the configuration into the limits of the store, the governor and clients.

Owns: the mapping from settings to limits. Does not own the settings (config.py), the limits that are no settings and
have their value where they are declared, nor the effect of a limit.
"""

from __future__ import annotations

from typing import Final

from ...ipc.messages import schema
from ..claims.quotas import Kind, Quota
from ..forms.limits import StoreLimits
from ..governor.forms.limits import GovernorLimits
from .config import Config

STATUS_CLIENTS_MAX: Final = 64
CLAIMS_MAX: Final = 65_536
"""Claims that all uids together may hold or wait for."""
MESSAGE_BYTES_MAX: Final = 1 << 20
NAMESPACES_MAX: Final = 65_536
"""Namespaces that can be invalidated. The index has 16 bytes for each."""
PINNED_SHARE_MAX: Final = 0.5
"""The share of the ring that explicit pins of all clients together may keep."""
TREE_DEPTH_MAX: Final = 32


def store_limits(config: Config, ring_bytes: int, max_entries: int) -> StoreLimits:
    """The limits of the store's core, for a ring of `ring_bytes` and an index with room for `max_entries`."""
    limits = config.limits
    return StoreLimits(
        ring_bytes=ring_bytes,
        max_bytes=min(config.max_bytes or ring_bytes, ring_bytes),
        max_entries=max_entries,
        max_tokens=config.max_tokens,
        object_bytes_max=min(limits.object_bytes_max or ring_bytes, ring_bytes),
        default_ttl_s=config.default_ttl_s,
        prefix_tokens_max=limits.prefix_tokens_max,
        prefix_wait_s=limits.prefix_wait_s,
        claim_s=limits.claim_s,
        claim_s_max=limits.claim_s_max,
        pinned_bytes_max=int(PINNED_SHARE_MAX * ring_bytes),
        remote_s=0.0 if config.remote.url is None else config.remote.timeout_s,
        remote_writes=config.remote.url is not None and config.remote.write,
    )


def quota_rules(config: Config) -> dict[Kind, Quota]:
    """The quota of one uid for each kind of resource: at least 1 of each."""
    limits, share = config.limits, config.quotas.limits_share_max
    totals: dict[Kind, tuple[str, str, int]] = {
        "clients": ("clients", "limits.clients_max", limits.clients_max),
        "status_clients": ("readers of the status socket", "the fixed total", STATUS_CLIENTS_MAX),
        "lanes": ("lanes", "limits.lanes_max", limits.lanes_max),
        "claims": ("claims and waits", "the fixed total", CLAIMS_MAX),
        "namespaces": ("namespaces that it invalidated first", "the fixed total", NAMESPACES_MAX),
    }
    return {
        kind: Quota(things, limit, total, f"quotas.limits_share_max = {share:g}", max(1, int(share * total)))
        for kind, (things, limit, total) in totals.items()
    }


def wire_limits(config: Config, ring_bytes: int) -> schema.ClientLimits:
    limits = config.limits
    return schema.ClientLimits(
        message_bytes_max=MESSAGE_BYTES_MAX,
        object_bytes_max=min(limits.object_bytes_max or ring_bytes, ring_bytes),
        claim_s=limits.claim_s,
        claim_s_max=limits.claim_s_max,
        prefix_tokens_max=limits.prefix_tokens_max,
        tree_depth_max=TREE_DEPTH_MAX,
    )


def governor_limits(config: Config) -> GovernorLimits:
    gauges, pressure, device = config.gauges, config.pressure, config.device
    return GovernorLimits(
        thresholds=pressure.thresholds(),
        sample_s=gauges.sample_s,
        sample_pressed_s=gauges.sample_pressed_s,
        relaxed_idle_s=pressure.relaxed_idle_s,
        normal_idle_s=pressure.normal_idle_s,
        critical_idle_s=pressure.critical_idle_s,
        ack_s=pressure.ack_s,
        retry_s=pressure.retry_s,
        max_bytes=device.max_bytes,
        neighbours=config.neighbours.servers or (),
        neighbour_answer_s=config.neighbours.answer_s,
        baselines=device.baseline or (),
        block_bytes=config.queueing.block_bytes,
    )
