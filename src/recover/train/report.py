"""Turns what a job is and what a step did into its records. Layer: train."""

import torch

from recover.core.data import ExactLedger
from recover.core.effects import Facts
from recover.core.iteration import JobState
from recover.core.policies import StaticWorldPolicy
from recover.records import EventRecord, StepRecord
from recover.tensors.buckets import Totals
from recover.train.job import Job
from recover.train.stopwatch import Stopwatch


def step_record(
    facts: Facts,
    totals: Totals,
    watch: Stopwatch,
    *,
    wall_s: float,
    time: float,
    checksum: str | None,
) -> StepRecord:
    """Return the record of a committed step; the loss is the mean over its contributions."""
    contributions = facts.contributions
    return StepRecord(
        step=facts.step,
        loss=totals.loss / facts.divisor,
        microbatches=sum(contributions.values()),
        contributions=contributions,
        ids={r: a.ids if a.admitted else () for r, a in facts.plan.items()},
        epoch=facts.epoch,
        survivors=facts.survivors,
        accumulation=facts.accumulation,
        roles={r: str(role) for r, role in facts.roles.items()},
        boundary=facts.boundary,
        failed=facts.failed,
        tokens=totals.tokens,
        wall_s=wall_s,
        sync_s=watch.sync_s,
        recovery_s=watch.recovery_s,
        time=time,
        checksum=checksum,
    )


def event_records(facts: Facts, watch: Stopwatch, time: float) -> list[EventRecord]:
    """Return one record for each recovery of the step, in order."""
    events = []
    for times in watch.recoveries:
        recovery = times.recovery
        assert recovery is not None, "a step commits only after each recovery was planned"
        events.append(
            EventRecord(
                step=facts.step,
                location=times.location,
                replicas=recovery.failed,
                ranks=recovery.failed_ranks,
                boundary=recovery.boundary,
                promoted=recovery.promoted,
                extra=dict(recovery.extra),
                restored_buckets=recovery.restored,
                mode=str(recovery.mode),
                detect_s=times.detect_s,
                repair_s=times.repair_s,
                restore_s=times.restore_s,
                extra_s=times.extra_s,
                total_s=times.total_s,
                epoch=recovery.epoch,
                time=time,
            )
        )
    return events


def run_settings(job: Job, state: JobState, until: int) -> dict[str, object]:
    """Return what readers of the records need to know about the run."""
    return {
        "microbatches": job.microbatches,
        "replicas": job.replicas,
        "ranks_per_replica": job.mesh.ranks_per_replica,
        "steps": until,
        "policy": "static" if isinstance(job.rules.policy, StaticWorldPolicy) else "adaptive",
        "restore": str(job.rules.restore),
        "data": "exact" if isinstance(state.data, ExactLedger) else "stream",
        "faults": None if job.faults is None else str(job.faults),
        "torch": str(torch.__version__),
    }
