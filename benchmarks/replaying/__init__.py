"""What replays recorded workloads through caches: the traces, the drivers, the policies beside it, the goals.

`replay.py` is the command.
"""
