#!/usr/bin/env bash
# Packs what a machine that reaches no registry needs to run the public models of JAX: every file that they open of the
# checkouts and packages, except packages that the machine has.
#
#   scripts/public_models/pack.sh OUT.tar.xz CHECKOUTS PACKAGES [NAME ...]
#
# CHECKOUTS: folder of the repositories of xlafuse/bench/public/sources.py. PACKAGES: where pip installed its packages (--target).
# NAME: packages to leave out, such as numpy. The archive holds the folders checkouts and packages; there:
#
#   tar xf OUT.tar.xz -C FOLDER
#   python -m xlafuse.cli bench public --checkouts FOLDER/checkouts --packages FOLDER/packages ...
set -euo pipefail
out=$(realpath "$1") checkouts=$(realpath "$2") packages=$(realpath "$3")
shift 3
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Without cached bytecode, Python opens the sources of all that it imports.
USE_TORCH=0 JAX_PLATFORMS=cpu PYTHONPATH="$root:$packages" PYTHONDONTWRITEBYTECODE=1 PYTHONPYCACHEPREFIX="$work/none" \
    "${PYTHON:-$root/.venv/bin/python}" - "$root" "$checkouts" "$packages" "$work" "$@" <<'PYTHON'
import sys
from pathlib import Path

root, checkouts, packages, work = map(Path, sys.argv[1:5])
opened = set()


def note(event, arguments):
    if event == "open" or (event == "import" and arguments[1]):
        opened.add(str(arguments[event == "import"]))


sys.addaudithook(note)
import jax
import jax.numpy as jnp
from xlafuse.bench.public.sources import MODELS

for model in MODELS:
    program = model.build(checkouts, jnp.bfloat16, "tiny")
    params = jax.eval_shape(program.init, jax.random.key(0))
    jax.eval_shape(program.loss, params, *program.batch)

left_out = {name.lower() for name in sys.argv[5:]}
for folder in (checkouts, packages):
    files = {Path(name).relative_to(folder) for name in opened if Path(name).is_relative_to(folder)}
    kept = sorted(f for f in files if (folder / f).is_file() and f.parts[0].split("-")[0].lower() not in left_out)
    (work / folder.name).write_text("\n".join(map(str, kept)) + "\n")
    print(f"{len(kept)} files of {folder}", file=sys.stderr)
PYTHON

mkdir -p "$work/pack/checkouts" "$work/pack/packages"
tar -C "$checkouts" -chf - -T "$work/${checkouts##*/}" | tar -C "$work/pack/checkouts" -xf -
tar -C "$packages" -chf - -T "$work/${packages##*/}" | tar -C "$work/pack/packages" -xf -
XZ_OPT=-9 tar -C "$work/pack" -cJf "$out" checkouts packages
du -h "$out"
