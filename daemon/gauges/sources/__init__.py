"""The sources of gauges: each reads how full some devices are, from a library, files of the kernel, or clients.

May import ipc, shm, `reading`, daemon/process and the governor's forms; not the chain nor the threads above it. Owns
the calls of each library, and the table of sources. Does not own when a source is read.
"""
