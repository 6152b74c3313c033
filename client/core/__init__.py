"""The public client: Client, AsyncClient, and their calls, with their docstrings, default arguments and checks.

It may import all packages below: `computing` and `pressure`, `link`, `reading` and `writing`, `arguments` and
`threads`. It owns the state of a client; none of the caches on top is known here.
"""
