"""The public client: Client, AsyncClient, and their calls, a module for each topic.

It owns the docstrings, default arguments and checks of the calls, and the spans of tracing. It may import all packages
below: `computing` and `pressure`, `link`, `reading` and `writing`, `arguments` and `threads`.
None of the caches on top is known here.
"""
