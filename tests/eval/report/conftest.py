from __future__ import annotations

from pathlib import Path

import pytest

from specdec.eval.report.gather import gather
from specdec.eval.report.page import write_report
from tests.browser import open_page as open_page
from tests.eval.report.made_up import write_point, write_sweep


@pytest.fixture(scope="session")
def point_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of one made-up point."""
    folder = tmp_path_factory.mktemp("one")
    return write_report(gather([write_point(folder / "run")]), folder / "report")


@pytest.fixture(scope="session")
def sweep_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of a made-up sweep over batch sizes and draft lengths."""
    folder = tmp_path_factory.mktemp("sweep")
    return write_report(gather([write_sweep(folder / "run")]), folder / "report")
