"""The evaluation: contenders on the same task, experiments, figures. Layer: evaluation.

A *contender* is a way to train through failures: ReCoVer, checkpoint-restart, torchft, and a
reference that never fails. :func:`recover.evaluation.contender.run` runs one by its name, with real
processes and real SIGKILLs, and returns what it left: a :class:`~.contender.Trace`.
"""
