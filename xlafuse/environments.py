"""Compiles a program in other environments: with another version of jax, or by another Python.

Each compiles in a process of its own, by `xlafuse report --keep-capture`, with this xlafuse; the captures are analyzed
here, so that two versions of jax differ in what XLA made and in nothing else.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from hlo_analysis.errors import InputError

if TYPE_CHECKING:
    from hlo_analysis.capture import Capture
    from hlo_analysis.records import Analysis

_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")
"""All of one version."""
_OWN = ("xlafuse", "pallas_kernels", "hlo_analysis")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A Python with its packages. folders: what comes before them on its path."""

    name: str
    python: str
    folders: tuple[Path, ...] = ()


def cache_folder() -> Path:
    """Returns the folder where versions of jax are kept."""
    return platformdirs.user_cache_path("xlafuse") / "jax"


def chosen(versions: Sequence[str], pythons: Sequence[str]) -> list[Environment]:
    """Returns two environments, of versions of jax and of Pythons; the first is this one if only one is given.

    Raises:
        InputError: there are more than two, or one cannot be had.
    """
    if len(versions) + len(pythons) > 2:
        raise InputError("expected two environments at most, of --jax VERSION and --python ENV")
    if len(versions) + len(pythons) == 1:
        versions = (installed_version("jax"), *versions)
    return [*map(with_jax, versions), *map(with_python, pythons)]


def with_jax(version: str) -> Environment:
    """Returns this environment with another version of jax, which pip puts into the cache folder the first time.

    Raises:
        InputError: it is no version, or pip cannot install it.
    """
    if not re.fullmatch(r"\d+(\.\w+)+", version):
        raise InputError(f"expected --jax VERSION as 0.11.2, got {version!r}")
    name = f"jax {version}"
    if version == installed_version("jax"):
        return Environment(name=name, python=sys.executable)
    folder = cache_folder() / f"{version}-py{sys.version_info.major}.{sys.version_info.minor}"
    if not folder.exists():
        _install([f"{package}=={version}" for package in _PACKAGES], folder)
    return Environment(name=name, python=sys.executable, folders=(folder,))


def with_python(path: str) -> Environment:
    """Returns the environment of a Python, given as its executable or as a virtual environment's folder.

    Raises:
        InputError: there is no Python.
    """
    given = Path(path)
    python = next(
        (each for each in (given / "bin" / "python", given / "Scripts" / "python.exe", given) if each.is_file()), None
    )
    if python is None:
        raise InputError(f"expected --python as an executable or the folder of a virtual environment, got {path!r}")
    return Environment(name=path, python=str(python.absolute()), folders=(_own_packages(),))


def _install(requirements: Sequence[str], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", f"{partial}/packages"]
        print(f"installing {' '.join(requirements)} into {folder}", file=sys.stderr)
        done = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
        if done.returncode:
            last = "\n".join(done.stderr.strip().splitlines()[-3:])
            raise InputError(
                f"pip could not install {requirements[0]}; make an environment and name it with --python.\n{last}"
            )
        Path(partial, "packages").rename(folder)


def _own_packages() -> Path:
    """Returns a folder with links to this xlafuse, without the packages beside it."""
    folder = cache_folder().parent / "own"
    folder.mkdir(parents=True, exist_ok=True)
    for name in _OWN:
        spec, link = find_spec(name), folder / name
        assert spec is not None
        assert spec.origin is not None
        link.unlink(missing_ok=True)
        link.symlink_to(Path(spec.origin).parent, target_is_directory=True)
    return folder


def compile_in(environment: Environment, words: Sequence[str], strategy: str) -> Capture:
    """Compiles a program in an environment.

    Args:
        environment: where.
        words: of `xlafuse report`, which name the program, its shapes and the target.
        strategy: how.

    Raises:
        InputError: it does not compile there; the message has the last lines of what it printed.
    """
    from hlo_analysis.capture import Capture

    paths = [*map(str, environment.folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        own = ["--strategies", strategy, "--baseline", strategy, "--try", "0", "--no-numerics"]
        own += ["-o", folder, "--keep-capture", folder]
        command = [environment.python, "-m", "xlafuse.cli", "report", *words, *own]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
        if done.returncode:
            last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
            raise InputError(f"{environment.name}: the program does not compile there.\n{last}")
        return Capture.load(Path(folder, f"{strategy}.zip"))


def compiled_in_both(
    places: Sequence[Environment], words: Sequence[str], strategy: str
) -> tuple[Analysis, Analysis, list[str]]:
    """Compiles a program in two environments; returns both analyses, and the options of XLA that differ."""
    from hlo_analysis import analyze
    from xlafuse.catalogue import KERNELS

    captures = [compile_in(place, words, strategy) for place in places]
    before, after = (
        analyze(capture, label=place.name, catalogue=KERNELS) for capture, place in zip(captures, places, strict=True)
    )
    return before, after, changed_options(*captures)


_OPTION = re.compile(r"^ +(xla_\w+): (.*)$", re.MULTILINE)
_OF_CAPTURE = re.compile(r"xla_(dump|cpu|gpu_cuda_data_dir|gpu_load_autotune|gpu_collect_cost)")


def changed_options(before: Capture, after: Capture) -> list[str]:
    """Lists XLA's options whose values differ between two captures, in sentences, those that both know first.

    Options of the CPU compiler and of the capture are left out.
    """
    old, new = _options(before), _options(after)
    names = [name for name in sorted({*old, *new}, key=lambda name: (name not in old or name not in new, name))
             if old.get(name) != new.get(name) and not _OF_CAPTURE.match(name)]  # fmt: skip
    return [f"XLA's option {name}: {_changed(old.get(name), new.get(name))}" for name in names]


def _changed(old: list[str] | None, new: list[str] | None) -> str:
    """Describes how an option's values changed; of a list only what was added and removed."""
    if old is None or new is None:
        return f"{', '.join(new or old or ())}, which only {'A' if new is None else 'B'} knows"
    if len(old) < 2 and len(new) < 2:
        return f"{', '.join(old)} before, {', '.join(new)} now"
    added, removed = ([each for each in these if each not in those] for these, those in ((new, old), (old, new)))
    said = [f"{', '.join(found)} {what}" for found, what in ((added, "added"), (removed, "removed")) if found]
    return "; ".join(said) or "in another order"


def _options(capture: Capture) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in _OPTION.findall(capture.text("module_config") or ""):
        found.setdefault(name, []).append(value)
    return found
