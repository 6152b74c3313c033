"""Free memory of cards that is promised to clients, so that no two take the same bytes.

    reserve → granted, or waits in `queue` by priority → granted once memory is free → ended by its client

Owns: reservations, the queue of those that wait, and room that an operator asks for (`rooms`). Does not own entries.
"""
