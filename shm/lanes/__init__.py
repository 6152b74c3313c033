"""Lanes: each client's own segment, with its pins, its log of hits and its queue of puts.

It may import `shm.ring` and `tensord.errors`. It owns both ends of a lane, the records of the queue, and the fence
between a pin and the daemon's scan of pins.
"""
