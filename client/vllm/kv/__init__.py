"""vLLM's KV blocks, shared by all engines of the host that compute the same KV.

    connector   what vLLM's scheduler and workers call; checks at the engine's start
    spec        the parts that vLLM's offloading connector asks for
    layout      which models, KV layouts and configurations are covered
    keys        names of blocks
    hints       a request's agent, and the turns of agents
    manager     the scheduler's side: lookups, pins, what is stored
    jobs        messages between the manager and the workers
    worker      a worker's side: copies between the ring and the KV cache

vLLM's OffloadingConnector decides which blocks are loaded and stored. This package gives it tensord as the place.
"""
