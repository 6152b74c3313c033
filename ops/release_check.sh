#!/usr/bin/env bash
# Checks what would be released: builds sdist and wheel into the folder given, and uses each as a user does.
#     ops/release_check.sh dist          with the Python that $PYTHON names
# 1. `twine check --strict` and `check-wheel-contents` accept both.
# 2. Each is installed into a new virtual environment, without this checkout. There the program of README.md runs twice
#    with a daemon of this environment, as a miss and as a hit: one entry is stored.
set -euo pipefail
checkout=$(readlink -f "$(dirname "$0")/..")
mkdir -p "$1"
out=$(readlink -f "$1") python=${PYTHON:-python3} work=$(mktemp -d)
daemon=
trap '[ -z "$daemon" ] || kill -INT "$daemon" 2>/dev/null || true; rm -rf "$work"' EXIT

rm -f "$out"/*.whl "$out"/*.tar.gz
cd "$checkout"
"$python" -m hatchling build -d "$out"
"$python" -m twine check --strict "$out"/*.whl "$out"/*.tar.gz
# W002: a unit of the host and one of a user may be equal.
"$python" -m check_wheel_contents --toplevel tensord --ignore W002 "$out"/*.whl

sed -n '/^```python$/,/^```$/{//!p}' README.md >"$work/program.py"
cd "$work"
export TENSORD_SOCKET=$work/control.sock TENSORD_STATUS_SOCKET=$work/status.sock
export TENSORD_INSTANCE=release-$$ TENSORD_RING_BYTES=16MiB
for archive in "$out"/*.whl "$out"/*.tar.gz; do
  "$python" -m venv --clear new
  new/bin/python -m pip --disable-pip-version-check --no-input -q install -c "$checkout/constraints.txt" "$archive"
  new/bin/tensord --version
  new/bin/tensord &
  daemon=$!
  new/bin/python -c 'import sys, tensord; sys.exit(not tensord.Client().wait_connected(60))'
  first=$(new/bin/python program.py) second=$(new/bin/python program.py)
  stored=$(new/bin/tensorctl status --json | new/bin/python -c 'import json, sys; print(json.load(sys.stdin)["store"]["puts"])')
  [ "$first" = "$second" ] && [ "$stored" = "{'stored': 1}" ] || { echo "README's program: $first, $second, $stored" >&2; exit 1; }
  kill -INT "$daemon"
  wait "$daemon"
  daemon=
  echo "installed and used in a new environment: $(basename "$archive")"
done
