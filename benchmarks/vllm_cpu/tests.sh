#!/usr/bin/env bash
# usage: tests.sh FOLDER - vLLM's own tests into FOLDER/vllm-tests, out of its source distribution (44 MB). FOLDER is the
# environment of install.sh. `make test-vllm` runs some of them against tensord's classes (tests/vllm/test_theirs.py).
set -euo pipefail
folder=$1
version=0.32.0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=("$folder/bin/python" -m pip --disable-pip-version-check --no-input -qq)
echo "fetching vLLM's own tests into $folder/vllm-tests"
# pip asks a source distribution for its version, which takes its build tools; nothing is built.
"${pip[@]}" install --no-deps --target "$work/tools" \
  setuptools-rust==1.13.0 semantic-version==2.10.0 setuptools-scm==10.3.4 vcs-versioning==2.6.0
PYTHONPATH="$work/tools" VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$version "${pip[@]}" download \
  --no-deps --no-build-isolation --no-binary vllm --dest "$work" "vllm==$version"
tar -xzf "$work/vllm-$version.tar.gz" -C "$work" "vllm-$version/tests"
rm -rf "$folder/vllm-tests"
mv "$work/vllm-$version" "$folder/vllm-tests"
