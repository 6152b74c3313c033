"""The replay of recorded workloads through caches: traces, drivers, other policies, goals.

The command is `replay.py`.
"""
