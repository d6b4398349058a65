"""The transport refuses what would go wrong silently."""

import os
import subprocess
import sys

from tests.mpi.harness import ROOT, launch


def test_a_job_without_fault_tolerance_is_refused() -> None:
    outcome = launch("tests.mpi.transport_ranks:refused", 2, {"replicas": 2}, fault_tolerant=False)
    assert set(outcome.values) == {0, 1}, outcome.text
    for message in outcome.values.values():
        assert "fault tolerance (ULFM) is not active" in message
        assert "`recover run`" in message


def test_a_process_outside_of_any_job_is_refused() -> None:
    code = "from tests.mpi.transport_ranks import refused; print(refused(1))"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert "fault tolerance (ULFM) is not active" in done.stdout, done.stderr


def test_misuse_is_told_on_every_rank_and_an_error_without_a_death_is_mended() -> None:
    outcome = launch("tests.mpi.transport_ranks:misuse", 2)
    assert set(outcome.values) == {0, 1}, outcome.text
    for result in outcome.values.values():
        assert "3 replicas x 1 ranks need 3 processes, but 2 were started" in result["wrong_size"]
        assert "buckets of different sizes or types" in result["unequal"]
        assert "MPI is called by the thread that joined" in result["thread"]
        assert result["equal"] is True
        assert (result["moved"], result["verdict"]) == (False, False)
        assert (result["epoch"], result["mended"]) == (1, True)
