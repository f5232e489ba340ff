#!/usr/bin/env bash
# Makes .venv with a Python of at least 3.12 and installs this project with the extras named, at pinned versions.
# usage: make_venv.sh EXTRA[,EXTRA...]       PYTHON=... chooses the interpreter
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:?usage: make_venv.sh EXTRA[,EXTRA...]}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

find_python() {
  local name
  for name in ${PYTHON:-} python3.12 python3.13 python3.14 python3 python; do
    if command -v "$name" >/dev/null 2>&1 && new_enough "$name"; then echo "$name"; return; fi
  done
  if command -v uv >/dev/null 2>&1 && name=$(uv python find '>=3.12' 2>/dev/null); then echo "$name"; return; fi
  echo "xlafuse needs Python 3.12 or newer and found none: install one (apt install python3.12 python3.12-venv," \
       "brew install python@3.12, or pyenv install 3.12), or name it with PYTHON=/path/to/python" >&2
  return 1
}

if [ -e .venv ] && ! new_enough .venv/bin/python; then rm -rf .venv; fi  # half-made, or by another Python
if [ ! -e .venv ]; then
  python=$(find_python)
  echo "making .venv with $("$python" --version)"
  "$python" -m venv .venv || { rm -rf .venv; exit 1; }
fi
echo "installing xlafuse[$extras]"
# --no-compile: modules compile when they are first imported, and most never are.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt \
  --editable ".[$extras]"
