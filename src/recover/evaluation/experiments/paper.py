"""The paper's numbers, and the emulated device that has their ratios. Layer: evaluation; pure.

Derivation. The 512-GPU run gives the cost of a microbatch: with s = 512 tokens per GPU and
microbatch, s / T = t_c + T_r / G holds at (G = 131, T = 1,793) and (G = 256, T = 2,188), so that
t_c = 0.18 s (and T_r = 13.8 s, that of the reshaped group). The 128-GPU runs, which are those that
meet checkpoint-restart, take 198.7 s / 32 = 6.2 s per step of 8 microbatches before a failure. That
leaves T_r = 6.2 s - 8 t_c = 4.8 s for checkpoint-restart's own all-reduce. A restart costs
25.3 s + 71.0 s + 4.0 s = 100.3 s (save, initialization, load; N = 32), which is 16 steps. The 132 s
of NCCL's timeout are left out: both systems of the paper pay them, and neither pays them here.
"""

from dataclasses import dataclass

LOSSES = {
    1: (11.016, 11.019),
    50: (7.771, 7.764),
    100: (6.697, 6.709),
    150: (5.920, 5.940),
    200: (5.359, 5.362),
    250: (4.951, 4.969),
}
"""Figure 7a: losses of the reference and of ReCoVer by step, counted from one."""
PHASES = ((2016.0, 1965.0), (2006.0, 1793.0), (2019.0, 2188.0))
"""Figure 7b: tokens/s/GPU of both before, between and after the failures."""
AFTER_FAILURES = (
    (120, 157.7, 170.3),
    (112, 157.7, 182.9),
    (104, 157.7, 196.3),
    (96, 157.7, 210.8),
    (88, 157.7, 230.8),
    (80, 157.7, 250.6),
    (72, 157.7, 278.1),
    (64, 157.7, 353.3),
)
"""Figure 8a: GPUs left, tokens/s/GPU of checkpoint-restart and of ReCoVer."""
PROGRESS = (
    (50, 39.1, 41.7),
    (100, 58.7, 75.2),
    (150, 92.3, 114.3),
    (200, 117.4, 172.8),
    (234, 136.8, 239.3),
)
"""Figure 8b: GPU-hours, millions of tokens of checkpoint-restart and of ReCoVer."""
PARTS = {
    2: ((0.5, 132.8, 25.5, 71.0, 4.0, 15.2), (0.0, 142.0, 9.0)),
    4: ((7.8, 132.0, 24.2, 74.7, 4.0, 21.3), (7.0, 143.0, 10.0)),
    8: ((20.4, 131.9, 24.6, 69.8, 4.0, 34.3), (22.0, 142.0, 9.0)),
    16: ((46.2, 132.4, 24.8, 68.3, 4.0, 58.3), (51.0, 142.0, 9.0)),
    32: ((93.7, 132.3, 25.3, 71.0, 4.0, 99.7), (110.0, 141.0, 9.0)),
    64: ((198.7, 131.7, 26.3, 71.0, 4.0, 205.1), (235.0, 141.0, 10.0)),
}
"""Figure 8c, by checkpoint interval, in seconds. Checkpoint-restart: training, timeout and exit,
save, restart initialization, load, rerun. ReCoVer: training, timeout, recovery."""

TOKENS_PER_GPU = 4096 / 8
"""Tokens of a microbatch per GPU of a replica."""
AFTER_FIRST = (131, 1793.0)
"""G = ceil(8192 / 63) and tokens/s/GPU after the first failure on 512 GPUs."""
AFTER_LAST = (256, 2188.0)
STEP_S = 198.7 / 32
"""A step of checkpoint-restart on 128 GPUs, 8 microbatches per replica."""
ACCUMULATION = 8
RESTART_S = 25.3 + 71.0 + 4.0


def microbatch_s() -> float:
    """Return t_c from two points of s / T = t_c + T_r / G."""
    (g1, t1), (g2, t2) = AFTER_FIRST, AFTER_LAST
    all_reduce = (TOKENS_PER_GPU / t1 - TOKENS_PER_GPU / t2) / (1 / g1 - 1 / g2)
    return TOKENS_PER_GPU / t2 - all_reduce / g2


@dataclass(frozen=True, slots=True)
class Emulation:
    """An emulated device and network."""

    microbatch_ms: float
    all_reduce_s: float


def emulation(restart_s: float) -> Emulation:
    """Return the device on which a restart of ``restart_s`` seconds weighs as much as there."""
    scale = restart_s / RESTART_S
    compute = microbatch_s()
    return Emulation(1000 * scale * compute, scale * (STEP_S - ACCUMULATION * compute))
