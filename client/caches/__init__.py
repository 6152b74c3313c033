"""Caches for encoder outputs, processor outputs and visual embeddings. Each can be used without the others."""
