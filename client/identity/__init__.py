"""What things are called: the one place where it is decided whether two processes mean the same by a name.

    engine        namespaces of a vLLM engine's encoder and of its processor, of all that follows
    vllm_fields   which fields of vLLM's configuration are in them, and why the others are not
    vllm_environment  the same of environment variables
    surroundings  versions, plugins, platform
    remote_code   code that comes with a model
    checkpoints   the weights of a model's files; weight_files, remembered, digest: how they are read
    adapters      LoRA adapters, by the weights that were loaded
    content       what an encoder is given
    described     values of configurations as text
    modules       the weights of torch modules
    settings      what else a torch module's output follows from

Invariant: everything that may change an output is in the name. Two different things never have one name; where that
cannot be known, there is no name, and nothing is shared.
"""
