"""The processor cache: a frontend stores a processor's output and sends a reference, and an engine reads the tree.

May import the client's core, the packages below it, and `measures` of the package above; no adapter. Owns the
references and how they are read, for how long a sender keeps what it referred to, and the counts of items.
"""
