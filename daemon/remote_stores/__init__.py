"""Remote stores: a directory, Valkey or Redis, and Mooncake behind one interface, and the threads that use it.

May import shm, ipc, errors, daemon/forms and daemon/process. Owns connections and files, the form of
objects, and what is checked after every read. Does not own what is read and written, nor when (daemon/remote).
"""
