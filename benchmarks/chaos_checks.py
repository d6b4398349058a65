"""The outside checker of chaos.py: JSON, arithmetic and plain torch; nothing of the library."""

import json
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from benchmarks.chaos_subject import microbatch, model_and_optimizer
else:
    from chaos_subject import microbatch, model_and_optimizer

Line = dict[str, Any]
Settings = dict[str, Any]
TOLERANCE = 1e-4


def problems_of(place: Path, settings: Settings) -> list[str]:
    """Return everything that is wrong with what a run left in ``place``."""
    steps = read(place / "run" / "steps.jsonl")
    events = read(place / "run" / "events.jsonl")
    return [
        *numbers(steps, settings),
        *microbatches(steps, settings),
        *membership(steps, events, settings),
        *(exact(steps, events) if settings["data"] == "exact" else streams(steps, settings)),
        *training(steps, settings, place),
        *agreement(steps, place),
    ]


def read(file: Path) -> list[Line]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def numbers(steps: list[Line], settings: Settings) -> Iterator[str]:
    found = [line["step"] for line in steps]
    if found != list(range(settings["steps"])):
        yield f"steps on record: {found}"


def microbatches(steps: list[Line], settings: Settings) -> Iterator[str]:
    """B in every step, each id once."""
    seen: set[int] = set()
    for line in steps:
        ids = ids_of(line)
        counts = (line["microbatches"], sum(line["contributions"].values()), len(ids))
        if counts != (settings["microbatches"],) * 3:
            yield f"step {line['step']}: {counts} microbatches, B={settings['microbatches']}"
        if len(set(ids)) != len(ids) or seen & set(ids):
            yield f"step {line['step']}: ids committed twice: {sorted(seen & set(ids))}"
        seen |= set(ids)


def membership(steps: list[Line], events: list[Line], settings: Settings) -> Iterator[str]:
    """Only those die who were to die, nobody comes back, and every loss is explained."""
    victims = {replica for _, replica, _ in (*settings["faults"], *settings["shots"])}
    alive, epoch = set(range(settings["replicas"])), 0
    for line in steps:
        now, step = set(line["survivors"]), line["step"]
        if not now <= alive or set(line["failed"]) != alive - now:
            yield f"step {step}: {sorted(now)} after {sorted(alive)}, failed {line['failed']}"
        if not alive - now <= victims:
            yield f"step {step}: lost {sorted(alive - now)}, to die were {sorted(victims)}"
        told = {r for event in events if event["step"] == step for r in event["replicas"]}
        if told != alive - now:
            yield f"step {step}: events name {sorted(told)}, lost were {sorted(alive - now)}"
        if line["epoch"] < epoch or (now != alive and line["epoch"] == epoch):
            yield f"step {step}: epoch {line['epoch']} after {epoch}"
        alive, epoch = now, line["epoch"]


def exact(steps: list[Line], events: list[Line]) -> Iterator[str]:
    """Each step commits the oldest open ids; where a spare was admitted, its ids instead of lost
    ones, which are the oldest then. Without that it is the failure-free set."""
    admitted = {event["step"] for event in events if event["promoted"]}
    done: set[int] = set()
    for line in steps:
        ids = set(ids_of(line))
        oldest = set(islice((number for number in count() if number not in done), len(ids)))
        if line["step"] not in admitted and ids != oldest:
            yield f"step {line['step']}: committed {sorted(ids)}, the oldest were {sorted(oldest)}"
        done |= ids


def streams(steps: list[Line], settings: Settings) -> Iterator[str]:
    """Each replica's ids are its own stream, in order and without a gap."""
    replicas = settings["replicas"]
    for replica in range(replicas):
        drawn = [number for line in steps for number in line["ids"].get(str(replica), [])]
        if drawn != list(range(replica, replica + replicas * len(drawn), replicas)):
            yield f"replica {replica} committed {drawn} of its stream"


def training(steps: list[Line], settings: Settings, place: Path) -> Iterator[str]:
    """Train again on the recorded ids; losses and the parameters at the end must agree."""
    torch.set_num_threads(1)
    model, optimizer = model_and_optimizer(seed=settings["seed"])
    for line in steps:
        optimizer.zero_grad()
        total = 0.0
        for number in sorted(ids_of(line)):
            loss = model(microbatch(number))
            (loss / line["microbatches"]).backward()
            total += loss.item()
        optimizer.step()
        loss = total / line["microbatches"]
        if not abs(loss - line["loss"]) <= TOLERANCE * abs(loss):
            yield f"step {line['step']}: loss {line['loss']}, trained again {loss}"
    wanted = [parameter.detach().double().sum().item() for parameter in model.parameters()]
    for file in sorted(place.glob("sums-*")):
        for got, sum_ in zip(json.loads(file.read_text(encoding="utf-8")), wanted, strict=True):
            if not abs(got - sum_) <= TOLERANCE * max(1.0, abs(sum_)):
                yield f"{file.name}: parameters sum to {got}, trained again {sum_}"


def agreement(steps: list[Line], place: Path) -> Iterator[str]:
    """All survivors say that they finished, with equal parameters."""
    said: dict[int, str] = {}
    for log in place.glob("run/logs/rank-*.log"):
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("recover: finished step"):
                said[int(log.stem.removeprefix("rank-"))] = line
    if len(set(said.values())) != 1:
        yield f"survivors differ, or none finished: {said}"
    survivors = set(steps[-1]["survivors"]) if steps else set()
    if not set(said) <= survivors:
        yield f"ranks {sorted(said)} finished, survivors are {sorted(survivors)}"


def ids_of(line: Line) -> list[int]:
    return [number for ids in line["ids"].values() for number in ids]
