"""vLLM's KV blocks, shared by all engines of the host that compute the same KV.

    connector   what vLLM's scheduler and workers call; checks at the engine's start
    layout      which models, KV layouts and configurations are covered
    keys        names of blocks
    hints       a request's agent, and the turns of agents
    scheduler   the scheduler's side: lookups, pins, what is stored
    jobs        messages between the manager and the workers
    worker      a worker's side: checks, loads, stores; transfers has the jobs until they are over
    copies      the interface of copies, and those of a KV cache in host memory
    device_copies   those of a GPU; registered_ring and staging have the host memory that it reads and writes

vLLM's OffloadingConnector decides which blocks are loaded and stored. This package gives it tensord as the place.
"""
