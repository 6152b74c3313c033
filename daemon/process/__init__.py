"""What the daemon has as a process: its log, the service manager and its limits.

May import ipc and errors, and nothing of the daemon. Owns the form of log lines and of notifications. Does not own when
anything is logged or told.
"""
