"""How a client writes: payloads into memory that the daemon lent to it, records into its lane.

Owns: grants, the copy of a payload, and what is known about a put until the daemon has settled it. Does not own: the
connection (connection.py says what is needed of one), nor reading.
"""
