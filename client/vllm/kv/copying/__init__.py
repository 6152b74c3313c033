"""Copies of KV blocks between a worker's KV cache and host memory, on the CPU and on a GPU.

It may import the client's rings and device interfaces, and of vLLM the results of transfers. It owns the streams, the
registrations of the ring, the page-locked memory, and the state of each job.
"""
