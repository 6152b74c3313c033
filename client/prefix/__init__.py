"""Prefix KV cache shared by all processes on the host.

Owns: blocks, their keys and layers, matches, and the sequences that this process keeps on a device. Does not own: the
ring and its eviction (the daemon's), nor a device's memory (`client/device`).
"""
