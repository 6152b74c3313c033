"""What the daemon and its clients say to each other by sockets and files.

It may import only `tensord.errors`. It owns the messages, the protocol, step graphs, quantities and the places of
sockets, and no meaning of a message: that is the daemon's and the client's.
"""
