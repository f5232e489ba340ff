"""Studies: published claims about fusion as programs, each counted without a GPU and timed on one.

>>> from xlafuse.studies import STUDIES, get_study, run_study
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import import_module

from xlafuse.errors import UnknownNameError
from xlafuse.studies.records import Part, Row, Study, StudyResult

STUDIES = (
    "cartpole",
    "softmax",
    "attention",
    "launches",
    "qkv",
    "mlp",
    "norm_linear",
    "linear_residual_norm",
    "int8",
    "lora",
    "experts",
    "vertical",
    "compute_bound",
    "fuse_or_spill",
    "incompatible",
    "dynamic_shapes",
    "compile_time",
    "saved_bytes",
    "targets",
    "batch_norm",
    "dlrm",
    "debugging",
)
"""Names of the studies, in the order of the pages."""
_PRODUCTS = ("qkv", "mlp", "norm_linear", "linear_residual_norm", "int8", "lora", "vertical", "compute_bound")


def get_study(name: str) -> Study:
    """Returns the study called `name`; raises `UnknownNameError` with the nearest names."""
    if name not in STUDIES:
        raise UnknownNameError("study", name, dict.fromkeys(STUDIES))
    if name in _PRODUCTS:
        return import_module("xlafuse.studies.product_studies").PRODUCT_STUDIES[name]
    return import_module(f"xlafuse.studies.{name}").STUDY


def run_study(study: Study, target: str = "h200") -> StudyResult:
    """Counts a study for a named target, or times it on this machine's GPU if the target is "attached"."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    environment = None
    if target == "attached":
        from xlafuse.bench.environment import environment as here
        from xlafuse.bench.kernels import require_gpu

        require_gpu()
        environment = here()
        found = _until_interrupted(study.time() if study.time else ())
        target = environment.device_kind
    else:
        found = _until_interrupted(study.count(target))
    part = Part(
        basis="measured" if environment else "counted",
        target=target,
        started=started,
        environment=environment,
        rows=tuple(row for row in found if isinstance(row, Row)),
        left_out=tuple(row for row in found if not isinstance(row, Row)),
    )
    return StudyResult(study=study.name, parts=(part,))


def _until_interrupted(rows: Iterable[Row | str]) -> list[Row | str]:
    """Collects the rows and keeps those found if a time limit interrupts the run."""
    found: list[Row | str] = []
    try:
        for row in rows:
            found.append(row)
    except KeyboardInterrupt:
        found.append("interrupted before the end")
    return found
