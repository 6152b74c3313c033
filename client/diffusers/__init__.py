"""diffusers' prompt embeddings through the cache: one process of the host encodes a prompt, the others read the result.

It may import the core, the identity and the parts of the transformers adapter that watch a model. It owns the wrapper
around a pipeline, the key of a call and the name of a pipeline.
"""

from .prompts import PromptTally, cached_prompts, tally, uncached_prompts

__all__ = ["PromptTally", "cached_prompts", "tally", "uncached_prompts"]
