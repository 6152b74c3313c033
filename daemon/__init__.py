"""The daemon: owns the ring and its index, decides what is kept, and has memory given back when a card fills up.

    app → actors → core → packages, governor → forms → store → replacement → shm, ipc

It may import shm and ipc, and nothing of the client. It owns every decision; what lies in shared memory and on the
wire is described by shm and ipc.
"""
