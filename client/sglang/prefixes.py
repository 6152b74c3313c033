"""Which prefixes of a sequence a hybrid model can be restored to, by SGLang's hit policies.

Owns: the policies. Does not own: lookups. Invariants: a prefix is usable only if every pool has all that its policy
asks for. A policy that is not known here makes no prefix usable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer


def usable_prefixes(
    kv_pages: int, wanted: Sequence[PoolTransfer], there: Mapping[str, Sequence[bool]]
) -> tuple[int, dict[str, int], list[int]]:
    """The arguments of SGLang's `PoolTransferResult`.

    Args:
        kv_pages: the number of pages of KV that are stored without a gap.
        wanted: the other pools, with their policies.
        there: for each of these pools, whether its part of each of the first `kv_pages` pages is stored.

    Returns:
        (pages of the longest usable prefix, pages of the longest one for each pool alone, all usable prefixes in
        pages, ascending).
    """
    hits: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
    usable = set(range(1, kv_pages + 1))
    for transfer in wanted if kv_pages else ():
        of_pool = _usable(kv_pages, transfer, there[transfer.name])
        if of_pool:
            hits[transfer.name] = max(of_pool)
        usable &= of_pool
    return max(usable, default=0), hits, sorted(usable)


def _usable(pages: int, transfer: PoolTransfer, there: Sequence[bool]) -> set[int]:
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        whole = next((at for at in range(pages) if not there[at]), pages)
        return set(range(1, whole + 1))
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        tail = max(1, len(transfer.keys or ()))
        return {end for end in range(1, pages + 1) if all(there[max(0, end - tail) : end])}
    return set()
