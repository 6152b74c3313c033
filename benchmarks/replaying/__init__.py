"""The replay of recorded workloads through caches: traces, drivers, other policies.

The command is `replay.py`.
"""
