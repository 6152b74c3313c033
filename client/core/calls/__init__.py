"""The public calls of `Client`, one module for each topic. `Client` (cache.py) derives from all of them.

- lookups.py: get, hold, get_many, get_into, contains, peek, reuse, ring
- puts.py: put, reserve, get_or_compute, claim
- entries.py: touch, evict, clear, current, invalidate, pin, unpin
- pressure.py: on_mode, modes, workflow, request_arrived, request_completed, reserve_device
- base.py: connected, tally, wait_connected, status, close; and what the other modules share

Owns: the docstrings, default arguments and checks of these calls. Does not own: how a call is carried out.
"""
