"""Which tests one process takes, where `make test` shares out files."""

from __future__ import annotations

from typing import Any

import pytest

FOLDERS_THAT_COMPILE = ("tests/analysis", "tests/capture", "tests/decisions", "tests/hlo")
"""Their files share programs that take up to half a minute to compile, once a process."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As `--dist loadfile`, but such a folder goes to one process as a file does."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrFolder(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            folder = file.rpartition("/")[0]
            return folder if folder in FOLDERS_THAT_COMPILE else file

    return ByFileOrFolder(config, log)
