"""Prefix KV: what a model's layers keep of token sequences, stored as blocks, and the longest prefix of a prompt.

May import the client's core, the packages below it, and `gpu`; no other cache and no adapter. Owns blocks,
their keys and layers, and matches; the ring and its eviction are the daemon's.
"""
