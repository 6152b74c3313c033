"""These tests need vLLM: `make test-vllm` installs it and runs them."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
