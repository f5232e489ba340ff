"""Every code block of the README and of docs/ runs as it stands, but for those that a comment skips with a reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sybil.document import Document
from sybil.example import Example
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])

TRAIN = """\
import jax
import jax.numpy as jnp


def step(parameters, batch):
    return jax.tree.map(lambda p: p - 0.1 * batch.mean() * p, parameters)


def arguments():
    weight = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    return {"w": weight}, weight
"""


def run_shell(example: Example) -> str | None:
    """What went wrong when bash ran the block; None if nothing did."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    command = ["bash", "-euo", "pipefail", "-c", example.parsed]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    return f"exit {done.returncode}\n{done.stdout}\n{done.stderr}" if done.returncode else None


PARSERS = (SkipParser(), PythonCodeBlockParser(), CodeBlockParser("bash", run_shell))


@pytest.mark.slow
@pytest.mark.drawn(1 / 10)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    readme = Document.parse(str(ROOT / "README.md"), PythonCodeBlockParser())
    (tmp_path / "model.py").write_text(str(next(iter(readme)).parsed), encoding="utf-8")
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert_blocks_run(page)


def assert_blocks_run(page):
    """Runs the code blocks of a page; raises what the first that fails raises."""
    for example in Document.parse(str(page), *PARSERS):
        try:
            example.evaluate()
        except pytest.skip.Exception:
            continue
        except Exception as error:
            if type(error).__name__ != "SkipTest":
                raise


@pytest.mark.parametrize("block", ["```bash\nfalse\n```\n", "```python\nassert False\n```\n"])
def test_a_code_block_that_fails_is_found(block, tmp_path):
    (tmp_path / "page.md").write_text(block, encoding="utf-8")
    with pytest.raises(AssertionError):
        assert_blocks_run(tmp_path / "page.md")


def test_every_page_is_linked():
    """A page that nothing links to is not found."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert not [
        page.name for page in (ROOT / "docs").rglob("*.md") if f"{page.relative_to(ROOT / 'docs')}" not in navigation
    ]
