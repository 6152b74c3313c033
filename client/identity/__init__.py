"""Names of models, settings and contents: decides whether two processes mean the same thing by a name.

It owns the one form in which values stand in names (described), the namespaces of vLLM's encoder, processor and KV
(engine), the names of torch modules (modules, settings) and of inputs (content), and the lists of what is left out of a
name, with reasons. It may import `checkpoints` and `arguments`. A name covers everything that may change an output: if
this cannot be ensured, there is no name, and nothing is shared.
"""
