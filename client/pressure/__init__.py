"""What a client hears and says of memory pressure: modes, workflows, reservations of device memory.

It owns the subscriptions with the thread of their callbacks, and what each new daemon is told again. It may import
`link`, `arguments` and `threads`.
"""
