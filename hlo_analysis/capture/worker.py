"""The process that compiles: reads a request, writes XLA's dumps and a result, and may die without harm to its parent.

Run as a script (`python -P worker.py FOLDER`) with nothing of this package imported, so that it starts fast and from
anywhere. It imports JAX while its parent still traces, then waits for the name of the request file on its input.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")


def ask_at(address: str) -> None:
    """Has the process at the address answer how calls of Python cut their arrays; see `partitions.py`."""
    from functools import partial
    from multiprocessing.connection import Client

    from jax._src import xla_bridge
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    asked = Client(address)

    def partition(shapes: Any, shardings: Any, result: Any, result_sharding: Any, key: Any) -> Any:
        given = [str(each) for each in shapes], [each.to_string() for each in shardings]
        asked.send((*given, str(result), result_sharding.to_string(), key))
        answer = asked.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        module, operands, results = answer
        made = xla_client.HloSharding.from_string
        return module, [made(each) for each in operands], made(results)

    register = partial(
        xla_client.register_custom_call_partitioner,
        name="CustomSPMDPartitioning",
        prop_user_sharding=lambda sharding, *_: sharding,
        partition=partition,
        infer_sharding_from_operands=lambda _, shardings, *__: shardings[0],
        can_side_effecting_have_replicated_sharding=True,
    )
    xla_bridge._plugin_callbacks.insert(0, register)  # before JAX's own, as the first one stays


def main(folder: Path) -> int:
    """Compiles the request that the parent names on standard input; returns 0 when it wrote a result file."""
    with contextlib.suppress(ImportError):
        # Brings the symbols that Mosaic kernels link to; without it: "Symbols not found: mosaic_gpu_init_tma_desc".
        import jax.experimental.mosaic.gpu  # noqa: F401
    line = sys.stdin.readline().strip()
    if not line:  # the parent gave up before there was anything to compile
        return 0
    request = json.loads((folder / line).read_text(encoding="utf-8"))
    os.environ.update(request.get("environment", {}))
    result: dict[str, Any] = {"ok": False, "versions": versions()}
    started = time.perf_counter()
    try:
        result |= describe_gpu() if request["kind"] == "describe" else compile_module(request, folder)
        result["ok"] = True
    except Exception as error:
        result |= {"error": str(error), "error_type": type(error).__name__}
    result["seconds"] = time.perf_counter() - started
    partial = folder / "result.json.partial"
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.replace(folder / "result.json")
    return 0


def compile_module(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compiles StableHLO bytecode with the request's options, and returns the memory it takes.

    Where the request says "measure" it also runs the program.
    """
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
    from jaxlib.mlir import ir

    if address := request.get("partitions"):
        ask_at(address)
    devices = find_devices(request)
    client, count = devices[0].client, len(devices)
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=count,
        device_assignment=[[device.id for device in devices]] if count > 1 else None,
        env_options_overrides=dict(request["options"]),
    )
    started = time.perf_counter()
    with mlir.make_ir_context():
        module = ir.Module.parse((folder / request["module"]).read_bytes())
        where = {"executable_devices": _jax.DeviceList(tuple(devices)), "compile_options": options}
        if request["kind"] == "attached" or request.get("measure"):
            # Loading is what makes XLA tune on the GPU and link as it would for a run.
            with gpu_lock(request, alone=False):
                executable = client.compile_and_load(module, **where)
        else:
            executable = client.compile(module, **where)
        compiled = time.perf_counter() - started
        runner = load_runner() if request.get("measure") else None
        arguments = runner.argument_types(module) if runner else []
    stats = executable.get_compiled_memory_stats()
    run = None
    if runner:
        close_log(folder)
        try:
            with gpu_lock(request, alone=True):
                run = runner.run(executable, arguments, devices, folder) | {"compile_seconds": compiled}
        except Exception as error:  # what was compiled can be analysed all the same
            run = {"error": f"{type(error).__name__}: {error}"}
    return {
        "run": run,
        "memory": {
            "argument_bytes": stats.argument_size_in_bytes,
            "output_bytes": stats.output_size_in_bytes,
            "alias_bytes": stats.alias_size_in_bytes,
            "temp_bytes": stats.temp_size_in_bytes,
            "peak_bytes": getattr(stats, "peak_memory_in_bytes", 0),
        },
    }


@contextlib.contextmanager
def gpu_lock(request: dict[str, Any], *, alone: bool) -> Iterator[None]:
    """Keeps a measurement on the attached GPU apart from other captures, whose autotuning would disturb it."""
    if request["kind"] != "attached":
        yield
        return
    import fcntl

    with (Path(tempfile.gettempdir()) / f"hlo_analysis-gpu-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def close_log(folder: Path) -> None:
    """Sends what is said from now on to run.log: the worker's log is read for what XLA did with the program alone."""
    print("The program has compiled. It is run now.", file=sys.stderr, flush=True)
    log = os.open(folder / "run.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)


def load_runner() -> ModuleType:
    """The file beside this one that runs programs."""
    file = Path(__file__).with_name("runner.py")
    spec = importlib.util.spec_from_file_location("runner", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def describe_gpu() -> dict[str, Any]:
    """What tracing for the attached GPU needs to know of it."""
    import jax
    from jax._src.cudnn.fused_attention_stablehlo import check_cudnn_version

    device = jax.devices("cuda")[0]
    try:
        cudnn_version = check_cudnn_version()
    except RuntimeError:  # not installed: XLA reports that where cuDNN attention is used
        cudnn_version = 0
    return {
        "device_kind": device.device_kind,
        "core_count": device.core_count,
        "compute_capability": device.compute_capability,
        "cudnn_version": cudnn_version,
    }


def find_devices(request: dict[str, Any]) -> list[Any]:
    """The devices to compile for: described GPUs, attached ones, or CPUs."""
    import jax
    from jax.experimental import topologies

    kind, count = request["kind"], request["devices"]
    if kind == "cuda":
        config = request["target_config"]
        return list(topologies.get_topology_desc(platform=kind, topology=f"1x1x{count}", target_config=config).devices)
    if kind == "cpu":
        jax.config.update("jax_num_cpu_devices", count)
    found = jax.devices("cpu" if kind == "cpu" else "cuda")
    if len(found) < count:
        raise ValueError(f"the program is spread over {count} devices, and JAX sees {len(found)} here")
    return found[:count]


def versions() -> dict[str, str]:
    """Versions of the packages that decide what comes out."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
