"""Runs that several tests look at: each is started once."""

from pathlib import Path

import pytest

from tests.end_to_end.harness import Run, run_subject
from tests.end_to_end.subject import Settings


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the failure-free run of the default settings, on 4 replicas."""
    directory: Path = tmp_path_factory.mktemp("undisturbed") / "job"
    return run_subject(directory, Settings(), replicas=4).finished()
