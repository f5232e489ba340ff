"""Keeps JAX's CUDA plugin from complaining on a machine that has no NVIDIA GPU.

With the `deviceless` extra the CUDA plugin is installed to compile, not to run. JAX calls every plugin when it first
looks for devices, and this one then logs a traceback ("Unable to load cuDNN") unless JAX_PLATFORMS=cpu is set. Neither
setting that variable nor `jax_platforms` would be ours to do: it would also hide a TPU. So only this one log record is
dropped, and only while no NVIDIA device file exists: on a machine with a GPU the message is news, and stays.
"""

from __future__ import annotations

import logging
from pathlib import Path

_LOGGER = "jax._src.xla_bridge"
_PLUGIN_FAILED = "Jax plugin configuration error"
# The files by which JAX itself decides whether there is a GPU to use (jax._src.hardware_utils).
_NVIDIA_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")


def has_nvidia_gpu() -> bool:
    """True where the operating system shows an NVIDIA GPU; asks neither CUDA nor JAX."""
    return any(Path(device).exists() for device in _NVIDIA_DEVICES)


class _MissingGpuFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        about_cuda = str(record.msg).startswith(_PLUGIN_FAILED) and "cuda" in str(record.args)
        return not about_cuda or has_nvidia_gpu()


def silence_missing_gpu() -> None:
    """Installs the filter, once."""
    logger = logging.getLogger(_LOGGER)
    if not any(isinstance(entry, _MissingGpuFilter) for entry in logger.filters):
        logger.addFilter(_MissingGpuFilter())
