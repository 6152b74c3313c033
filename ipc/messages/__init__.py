"""Messages, each declared once: id, fields, limits, and which part of the daemon handles it.

It may import only `tensord.errors`. It owns the protocol's version and all names and limits that both sides check;
`control` has everything that a sender or handler needs.
"""
