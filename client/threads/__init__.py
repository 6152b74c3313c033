"""Threads, signals and forks: what may happen to a client's process at any moment.

It owns work aside of signal handlers, waits that no exception leaves locked, and the order of what is done at a fork.
It may import no other package of `client/`.
"""
