"""How the suite is spread over two workers: real jobs one after the other, the rest beside them."""

from pathlib import Path

import pytest

REAL_PROCESSES = {
    "adapters",
    "conformance",
    "end_to_end",
    "launch",
    "mpi",
    "parallel",
    "stacks",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that start jobs in one worker: each job fills the machine by itself."""
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).parts[0] in REAL_PROCESSES:
            item.add_marker(pytest.mark.xdist_group("processes"))
