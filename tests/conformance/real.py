"""The real port: processes, Open MPI, SIGKILL."""

import dataclasses
import functools

from recover.core.mesh import Mesh, Place
from tests.conformance.programs import Scenario, Value
from tests.conformance.scenarios import QUIET
from tests.mpi.harness import Outcome, launch


def run(scenario: Scenario) -> dict[Place, Value]:
    """Return what each survivor returned."""
    if not scenario.strikes:
        programs = _quiet_programs(scenario.mesh)
        outcome, index = _play_quiet(scenario.mesh), programs.index(scenario.program)
    else:
        outcome, index = _play((scenario.program,), scenario), 0
    assert not outcome.hung, f"{scenario} hung\n{outcome.text}"
    assert not outcome.errors, f"{scenario}: {outcome.errors}\n{outcome.text}"
    return {scenario.mesh.place(r): values[index] for r, values in outcome.values.items()}


def _quiet_programs(mesh: Mesh) -> tuple[str, ...]:
    names = [s.program for s in QUIET if s.mesh == mesh]
    return (*(n for n in names if n != "shrink"), "shrink")  # no program can follow a bare shrink


@functools.cache
def _play_quiet(mesh: Mesh) -> Outcome:
    (first,) = (s for s in QUIET if s.mesh == mesh and s.program == "vote")
    return _play(_quiet_programs(mesh), first)


def _play(programs: tuple[str, ...], scenario: Scenario) -> Outcome:
    mesh = scenario.mesh
    arguments = {
        "programs": list(programs),
        "strikes": [dataclasses.asdict(strike) for strike in scenario.strikes],
        "replicas": mesh.replicas,
        "ranks_per_replica": mesh.ranks_per_replica,
    }
    return launch("tests.conformance.symbols:play", mesh.world_size, arguments)
