"""The protocol, as pure functions: no torch, no MPI, no clock, no threads, no randomness.

Theory of operation
-------------------
Every rank of the job runs the same coroutine, :func:`recover.core.iteration.iteration`. It never
touches the world: it *awaits effects* (:mod:`recover.core.effects`) and a performer, written for
real processes or for the simulator, answers them. What makes the protocol correct is which answers
are the same on every survivor:

- ``Agree``, ``Detect``, ``Shrink`` have uniform outcomes; only they may decide where to go next.
- ``Reduce``, ``Census``, ``Regroup`` may succeed here and fail there; such an outcome is never
  acted on, it only decides how this rank votes in the next ``Agree``.
- Everything else is local.

Between two agreements every rank computes what follows as a pure function of agreed facts (who is
left, what each of them holds), so roles, extra microbatches and data never need an election.

Modules: ``mesh`` (rank arithmetic), ``workload`` (roles and shares), ``policies``, ``data`` (which
microbatch goes where), ``ledger`` (bucket tags), ``effects``, ``guard`` (synchronise and repair),
``iteration`` (Algorithm 1), ``schedule`` (failures to inject).
"""
