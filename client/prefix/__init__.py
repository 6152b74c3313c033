"""Prefix KV cache: the computed state of token sequences, shared by all processes on the host.

Owns: blocks, their keys and layers, matches, and the copies that this process keeps in its own memory.
"""
