"""vLLM's KV blocks, shared by all engines of the host that compute the same KV: tensord is the place, and vLLM's
OffloadingConnector decides which blocks are loaded and stored.

It may import vLLM, the client, the identity and the package of the engine. It owns names of blocks, pins from a lookup
to the end of a load, and the messages between the scheduler's side and the workers.
"""
