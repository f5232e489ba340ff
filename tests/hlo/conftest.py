"""HLO text of many programs, compiled once a session in processes of their own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from hlo_analysis.hlo.lexer import unquote

HERE = Path(__file__).parent
TARGET = Path(__file__).parents[2] / "hlo_analysis" / "targets" / "h200.txtpb"
_BEFORE_FUSION = re.compile(r'hlo_module_before_fusion: ("(?:[^"\\]|\\.)*")')


@pytest.fixture(scope="session")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a platform ('cpu' or 'cuda') with one folder of dumps for each program."""

    @cache
    def compile_for(platform: str) -> Path:
        if platform == "cuda" and importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
            pytest.skip("needs the extra 'deviceless': XLA's CUDA compiler")
        folder = tmp_path_factory.mktemp(f"hlo_{platform}")
        command = [sys.executable, str(HERE / "hlo_programs.py"), str(folder), platform, str(TARGET)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        subprocess.run(command, check=True, env=environment, timeout=500, capture_output=True)
        return folder

    return compile_for


@pytest.fixture(scope="session")
def texts(dumped: Callable[[str], Path]) -> Callable[[str, str], dict[str, str]]:
    """Every different module text of one program: file name to text; the priority-fusion dump's module among them."""

    def read(platform: str, program: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for path in sorted((dumped(platform) / program).glob("*.txt")):
            text = path.read_text()
            embedded = _BEFORE_FUSION.search(text) if path.name.endswith("priority_fusion_dump.txt") else None
            if embedded:
                text = unquote(embedded[1])
            if text.startswith("HloModule"):
                found[path.name] = text
        return {name: text for text, name in {text: name for name, text in found.items()}.items()}

    return read
