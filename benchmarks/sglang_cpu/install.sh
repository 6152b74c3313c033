#!/usr/bin/env bash
# usage: install.sh PYTHON FOLDER - a virtual environment with the parts of SGLang that run without a GPU: the caches, host
# pools and storage backends. No CUDA package, and no engine (2.6 GB, most of it torch and triton). `make test-sglang` puts tensord and its tests' needs beside them.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=$1
folder=$2
echo "installing the caches of SGLang into $folder; this takes minutes"
"$python" -m venv --clear "$folder"
pip=("$folder/bin/python" -m pip --disable-pip-version-check --no-input -qq install --no-deps)
"${pip[@]}" -c "$root/constraints.txt" torch
"${pip[@]}" -r "$here/lock.txt"
"${pip[@]}" sglang==0.5.23 torchvision==0.28.0
# As beside vLLM: torchvision's compiled operators are linked against CUDA and stay unloaded.
site=$("$folder/bin/python" -c 'import site; print(site.getsitepackages()[0])')
cp "$root/benchmarks/vllm_cpu/torchvision_without_operators.py" "$site/"
echo 'import torchvision_without_operators' >"$site/torchvision_without_operators.pth"
# os._exit: at the interpreter's usual end triton prints a list of objects that it leaks.
CUDA_VISIBLE_DEVICES='' "$folder/bin/python" -W ignore -c '
import os, sglang, torch
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
print("torch", torch.__version__, "sglang", sglang.__version__, flush=True)
os._exit(0)'
