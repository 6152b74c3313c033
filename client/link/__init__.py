"""The connection to the daemon: attaching, sending, answers, and what follows from each message.

It owns the connection's thread, the requests that wait for an answer, the claims that are renewed, and the knowledge
whether the daemon is away. It may import `reading` and `writing`, `arguments` and `threads`.
"""
