"""How a client writes: payloads into memory that the daemon lent to it, records into its lane.

It owns grants, the copy of a payload, and what is known about a put until the daemon has settled it. It may import
`arguments` and `threads`; the connection is handed to it.
"""
