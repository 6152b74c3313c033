"""How a client reads: from the ring and its index in shared memory, without a message to the daemon.

It owns the mappings, leases and batches, handles for other processes, and finding lane words that were lost. It may
import `arguments` and `threads`, and never needs the connection: reads go on while the daemon is away.
"""
