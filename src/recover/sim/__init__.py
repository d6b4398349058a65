"""The simulator: virtual ranks that drive the protocol core, and everything that can go wrong.

Layer: sim (pure: standard library only, no clock, no threads, no global randomness) -> core.

Theory of operation
-------------------
A :class:`~recover.sim.world.World` runs one coroutine of the core per rank, up to the rank's next
collective. When every living member of a group waits in the same collective, the group *meets*:
the adversary may strike (kill, exclude, break the transport), then each member gets the outcome
that the performer contract in :mod:`recover.core.effects` allows. Nothing else happens in a world,
so a run is a function of the job's :class:`~recover.sim.job.Job` and of the adversary's picks.

Gradients are symbols: microbatch k contributes ``16**k``, so the hex digits of a reduced bucket
name what is in it. A :class:`~recover.sim.checkers.Referee` watches from outside and shares no code
with the core; it knows the truth about who is dead.

Modules: ``gradients`` (symbols, bucket memory), ``moves`` (what an adversary may do, where),
``adversary`` (exhaustive, seeded, sparse, scripted), ``ranks`` and ``world`` (the virtual job),
``checkers``, ``trace``, ``job`` (one run), ``search`` (all schedules, many seeds), ``scenario``
(golden conversations). ``python -m recover.sim --help`` is the command line.
"""
