"""Room for puts: made ahead of them, and lent to clients as grants.

    AskForGrants → lending (turns, limits, refusals) → runway (places, victims, scans, moves) → daemon/store
                          ↑ survey: whose entries may go        ↑ stretches: which neighbours, or who moves where

May import daemon/store, replacement, host_memory, reports, claims, forms, shm and ipc; nothing of actors, sockets or
threads. Owns when room is made, and who gets it.
"""
