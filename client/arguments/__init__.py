"""What callers pass: keys and their namespaces, values within limits, the options of a put.

It owns the checks and the messages of their errors, so that a mistake is named before anything is sent. It may import
no other package of `client/`.
"""
