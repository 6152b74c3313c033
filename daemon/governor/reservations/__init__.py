"""Free memory of cards that is promised to clients, so that no two take the same bytes.

It imports the governor's forms and the gauges' (modes), and knows nothing of entries. It owns the reservations, the
queue of those that wait, and the room that is being made for an operator.
"""
