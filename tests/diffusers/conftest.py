"""These tests need diffusers, transformers and torch."""

from __future__ import annotations

from importlib.util import find_spec

from ..transformers.conftest import _no_gradients, _one_thread, _patient, client, daemon

__all__ = ["_no_gradients", "_one_thread", "_patient", "client", "daemon"]

collect_ignore_glob = [] if find_spec("transformers") and find_spec("diffusers") else ["test_*.py"]
