"""A small sound run, for the tests of its records."""

from dataclasses import replace

from recover.core.workload import Role
from recover.records import EventRecord, RunRecord, StepRecord

STEP = StepRecord(
    step=0,
    loss=2.5,
    microbatches=6,
    contributions={0: 2, 1: 2, 2: 2},
    ids={0: (0, 1), 1: (2, 3), 2: (4, 5)},
    epoch=0,
    survivors=(0, 1, 2),
    accumulation=2,
    roles=dict.fromkeys((0, 1, 2), Role.MAJOR),
    boundary=False,
    failed=(),
    tokens=600,
    wall_s=0.25,
    sync_s=0.125,
    recovery_s=0.0,
    time=1.7e9,
)
"""An undisturbed step."""
HIT = replace(
    STEP,
    step=1,
    contributions={0: 3, 2: 3},
    ids={0: (6, 7, 8), 2: (10, 11, 9)},
    epoch=1,
    survivors=(0, 2),
    roles=dict.fromkeys((0, 2), Role.MAJOR),
    boundary=True,
    failed=(1,),
    recovery_s=0.5,
)
"""The next one, in which replica 1 died."""
AFTER = replace(
    HIT,
    step=2,
    ids={0: (12, 13, 14), 2: (15, 16, 17)},
    accumulation=3,
    boundary=False,
    failed=(),
    checksum="abc",
)
"""The last one."""
EVENT = EventRecord(
    step=1,
    location="reduce",
    replicas=(1,),
    ranks=(1,),
    boundary=True,
    promoted=(),
    extra={0: 1, 2: 1},
    restored_buckets=(0, 1),
    mode="non_blocking",
    detect_s=0.01,
    repair_s=0.02,
    restore_s=0.03,
    extra_s=0.04,
    total_s=0.1,
    epoch=1,
    time=1.7e9,
)
"""The recovery of HIT."""
CONFIG: dict[str, object] = {"microbatches": 6, "replicas": 3, "policy": "static"}
RUN = RunRecord(CONFIG, (STEP, HIT, AFTER), (EVENT,))
