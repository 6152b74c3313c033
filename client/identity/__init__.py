"""Names of models, settings and contents: decides whether two processes mean the same thing by a name.

    engine            namespaces of a vLLM engine's encoder, processor and KV, made from all modules below
    vllm_fields       the fields of vLLM's configuration that are left out of these names, and why
    vllm_environment  the same for environment variables
    surroundings      versions, plugins, platform; packages finds the version of a package
    remote_code       code that comes with a model
    checkpoints       the weights in a model's files; weight_files, remembered and digest read them
    adapters          LoRA adapters, by the loaded weights
    content           the input of an encoder
    described         values of configurations as text
    modules           the weights of torch modules
    settings          the other inputs of a torch module's output

Invariants: a name covers everything that may change an output, so two different things never have one name. If this
cannot be ensured, there is no name, and nothing is shared.
"""
