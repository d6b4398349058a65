"""Fault schedules as YAML files, and in words. Layer: files, above the core; no torch, no MPI.

What an entry means is said in :mod:`recover.core.schedule`. A file looks like this::

    faults:
      - {step: 3, replica: 1, rank: 0, location: reduce, bucket: 1}
"""

from collections.abc import Collection, Hashable, Mapping
from itertools import groupby
from pathlib import Path

import yaml

from recover.core.mesh import Mesh
from recover.core.schedule import AFTER_A_FAILURE, Fault, FaultSchedule, Location, parse

_IN_WORDS = {
    Location.DATA: "before its data is there",
    Location.MICROBATCH: "with a microbatch in hand",
    Location.FORWARD: "in a forward pass",
    Location.BACKWARD: "in a backward pass",
    Location.REDUCE: "while gradients are being reduced",
    Location.CONSENSUS: "before it votes on the step",
    Location.REPAIR: "while the survivors regroup",
    Location.RESTORE: "while buckets are restored",
    Location.EXTRA: "in an extra microbatch",
    Location.OPTIMIZER: "between the verdict and the optimizer",
}


# --- files ---------------------------------------------------------------------------------


def load(path: Path, mesh: Mesh) -> FaultSchedule:
    """Read the schedule in the YAML file ``path`` for a job of shape ``mesh``.

    Raises one ValueError that names the file and everything that is wrong with it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot read the fault schedule: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start})") from None
    try:
        # A subclass of SafeLoader that refuses more than its base does.
        document = yaml.load(text, Loader=_OneValuePerKey)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {_yaml_problem(error)}") from None
    except (ValueError, RecursionError) as error:  # an impossible date, a thousand brackets
        raise ValueError(f"{path}: not valid YAML: {error}") from None
    if document is None:
        raise ValueError(f"{path}: the fault schedule is empty; a job without faults needs none")
    try:
        return parse(document, mesh)
    except ValueError as error:
        lines = str(error).splitlines()
        what = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
        raise ValueError("\n  ".join([f"{path}: {what}:", *lines])) from None


def dump(schedule: FaultSchedule, parameters: Mapping[str, object] | None = None) -> str:
    """Return the YAML text of ``schedule``; what it was generated from goes into a comment."""
    lines = [f"# {key}: {value}" for key, value in (parameters or {}).items()]
    lines += ["faults:", *(f"  - {fault}" for fault in schedule.faults)]
    if not schedule.faults:
        lines[-1] = "faults: []"
    return "\n".join(lines) + "\n"


class _OneValuePerKey(yaml.SafeLoader):
    """YAML's plain values only; a key that stands twice in a mapping is an error, not the last."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice in one entry", key.start_mark
                )
            seen.add(key.value)
        mapping: dict[Hashable, object] = super().construct_mapping(node, deep)
        return mapping


def _yaml_problem(error: yaml.YAMLError) -> str:
    """Return what is wrong and where, on one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        return f"line {mark.line + 1}, column {mark.column + 1}: {what}"
    return " ".join(str(error).split())


# --- words ---------------------------------------------------------------------------------


def explain(schedule: FaultSchedule, mesh: Mesh) -> str:
    """Say step by step what will happen to a job of shape ``mesh``."""
    if not schedule.faults:
        return f"nobody dies; {_counted(mesh.replicas, 'replica')} from the first step to the last"
    lines = []
    alive = mesh.replicas
    for step, group in groupby(schedule.faults, key=lambda fault: fault.step):
        faults = tuple(group)
        lines.append(f"step {step}:")
        lines += [f"  {_sentence(fault, schedule, mesh)}" for fault in faults]
        alive -= len({fault.replica for fault in faults})
        lines.append(f"  {_left(alive, mesh)}")
    return "\n".join(lines)


def _sentence(fault: Fault, schedule: FaultSchedule, mesh: Mesh) -> str:
    who = f"replica {fault.replica}"
    if mesh.ranks_per_replica > 1:
        who += f" (its rank {fault.rank})"
    which = {"bucket": fault.bucket, "microbatch": fault.microbatch}
    exact = "".join(f", {key} {value}" for key, value in which.items() if value is not None)
    text = f"{who} dies {_IN_WORDS[fault.location]}{exact}"
    if fault.location not in AFTER_A_FAILURE:
        return text
    if any(_noticed_in(other) == fault.step for other in schedule.faults):
        return f"{text}, if the other failure leads there"
    return f"{text}: never comes, as nothing else fails in this step"


def _noticed_in(fault: Fault) -> int | None:
    """Return the step that a death disturbs by itself: the next one, once a verdict is clean."""
    if fault.location in AFTER_A_FAILURE:
        return None
    return fault.step + (fault.location is Location.OPTIMIZER)


def _left(alive: int, mesh: Mesh) -> str:
    if alive < 1:
        return "nobody is left: the job ends with an error"
    goes = "goes" if alive == 1 else "go"
    return f"{alive} of {_counted(mesh.replicas, 'replica')} {goes} on"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def delivery(fault: Fault) -> str:
    """Return the reason that a rank notes when it dies by this entry."""
    return f"fault schedule: {fault}"


def unreached(schedule: FaultSchedule, delivered: Collection[Fault]) -> list[Fault]:
    """Return the deaths that never happened, for the report at the end of a run."""
    return [fault for fault in schedule.faults if fault not in delivered]


# --- command line --------------------------------------------------------------------------


def parse_weights(text: str) -> dict[Location, float]:
    """Read location weights such as ``reduce=8,optimizer=1``.

    Raises ValueError for an unknown location, one given twice, or a weight that is no number.
    """
    names = ", ".join(Location)
    weights: dict[Location, float] = {}
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if name not in list(Location):
            raise ValueError(f"unknown location {name!r} in weights {text!r}; allowed: {names}")
        if not equals:
            raise ValueError(f"weights are written location=number, got {part.strip()!r}")
        if Location(name) in weights:
            raise ValueError(f"location {name} stands twice in weights {text!r}")
        try:
            weights[Location(name)] = float(number)
        except ValueError:
            raise ValueError(f"the weight of {name} must be a number, got {number!r}") from None
    return weights
