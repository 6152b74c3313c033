"""Messages on sockets: frames, the protocol of a connection, descriptors that travel along.

It may import `ipc.messages`, `ipc.places` and `tensord.errors`. It owns the framing and the order of messages, which
it checks without a socket (`connection`), and the client's blocking end.
"""
