"""What things are called: the one place where it is decided whether two processes mean the same by a name.

    checkpoints   the weights of a model's files
    adapters      LoRA adapters, by their files
    engine        a vLLM engine's encoder
    processors    a vLLM engine's processor
    content       what an encoder is given
    modules       the weights of torch modules
    settings      what else a torch module's output follows from

Invariant: everything that may change an output is in the name. Two different things never have one name; where that
cannot be known, there is no name, and nothing is shared.
"""
