"""Caches for encoder outputs, for processor outputs and for results computed from pictures, each of use alone."""
