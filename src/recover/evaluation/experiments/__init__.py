"""The experiments of the evaluation, by name. Layer: evaluation."""

from collections.abc import Mapping
from types import MappingProxyType

from recover.evaluation.experiments.breakdown import Breakdown
from recover.evaluation.experiments.failures import Failures
from recover.evaluation.experiments.peers import Peers
from recover.evaluation.experiments.progress import Progress
from recover.evaluation.experiments.protocol import Experiment
from recover.evaluation.experiments.scaling import Scaling
from recover.evaluation.experiments.throughput import Throughput
from recover.evaluation.experiments.trajectory import Trajectory

EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {
        experiment.name: experiment
        for experiment in (
            Trajectory(),
            Throughput(),
            Failures(),
            Progress(),
            Breakdown(),
            Peers(),
            Scaling(),
        )
    }
)
