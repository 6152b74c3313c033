"""What runs in an inference process: the client, and the adapters of vLLM, SGLang, transformers and diffusers.

    adapters → caches, prefix → device → core → link → reading, writing → shm, ipc

It may import shm and ipc, and nothing of the daemon. It owns the public classes of `tensord`, and how they act without
a daemon.
"""
