"""Language models of transformers: `generate` starts from the longest prefix that a process of the host has computed.

May import transformers and torch, the client's `prefix` and `identity`, and what the package above knows of other code
in a model. Owns which calls and families share, a model's name, and the way between its caches and the layers of a
prefix."""
