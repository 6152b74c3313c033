"""Copies of KV blocks between a worker's KV cache and host memory, on the CPU and on a GPU.

It may import the client's rings and device interfaces. It owns the streams, the registrations of the ring, and the
page-locked memory.
"""
