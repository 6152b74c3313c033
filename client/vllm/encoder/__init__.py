"""Encoder outputs of vLLM: the scheduler's side finds and awaits them, the workers' side loads and stores them.

It may import vLLM, the client, the identity and the package of the engine. It owns an engine's requests as far as their
inputs go, its claims and leases, the messages between the two sides, and the metrics.
"""
