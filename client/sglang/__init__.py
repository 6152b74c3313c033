"""tensord in SGLang: KV pages of the HiCache host pool, shared by all engines of the host.

It may import SGLang, the client and the identity. It owns the storage that SGLang calls, the names of pages and their
addresses in the host pool.
"""

from .storage import TensordHiCacheStorage

__all__ = ["TensordHiCacheStorage"]
