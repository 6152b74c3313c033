"""Prefix KV: what a model's layers keep of token sequences, stored as blocks, and the longest prefix of a prompt.

May import the client's core, its rooms for puts and arguments, and `gpu`; no other cache and no adapter. Owns blocks,
their keys and layers, and matches; the ring and its eviction are the daemon's.
"""
