"""The command line. Imports what a command needs, when it runs."""

import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn, cast

import typer

from recover.core.mesh import Mesh
from recover.errors import RecoverError
from recover.train.config import TrainConfig

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Pre-training that does not stop when hardware dies.",
)
faults_app = typer.Typer(no_args_is_help=True, help="Make and check failure schedules.")
app.add_typer(faults_app, name="faults")

Replicas = Annotated[int, typer.Option(help="Model copies to start (W_init).")]
Faults = Annotated[
    Path | None, typer.Option(help="YAML schedule of failures to inject.", metavar="FILE")
]
Texts = Annotated[
    list[Path] | None,
    typer.Option(help="Text file to train on, repeatable; default: Python's own.", metavar="FILE"),
]
Out = Annotated[Path | None, typer.Option(help="Run directory to create.", metavar="DIR")]


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def run(
    script: Annotated[Path, typer.Argument(help="Python script that calls recover.init().")],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    replicas: Replicas = 2,
    ranks_per_replica: Annotated[int, typer.Option(help="Ranks of one replica.")] = 1,
    faults: Faults = None,
    out: Out = None,
) -> None:
    """Run SCRIPT as a job that survives the death of its replicas."""
    from recover.launch import LaunchSpec
    from recover.launch import run as launch

    with _one_sentence():
        spec = LaunchSpec(
            script=script,
            args=tuple(args or ()),
            replicas=replicas,
            ranks_per_replica=ranks_per_replica,
            out=out or _new_run(script.stem),
            faults=_checked_faults(faults, Mesh(replicas, ranks_per_replica)),
        )
        status = launch(spec)
    raise typer.Exit(status)


Preset = StrEnum("Preset", ["nano", "tiny", "tiny_moe", "small"])
Data = StrEnum("Data", ["exact", "stream"])
Policy = StrEnum("Policy", ["static", "adaptive"])
Restore = StrEnum("Restore", ["auto", "blocking", "non_blocking"])
Dtype = StrEnum("Dtype", ["float32", "bfloat16"])
Parallel = StrEnum(
    "Parallel",
    {
        "plain": "plain",
        "ddp": "ddp",
        "fsdp1": "fsdp1",
        "hybrid": "hybrid",
        "fsdp2": "fsdp2",
        "3d": "3d",
    },
)
Schedule = StrEnum("Schedule", {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved": "interleaved"})


@app.command()
def train(
    replicas: Replicas = 4,
    microbatches: Annotated[int, typer.Option(help="B, committed by every step.")] = 16,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 30,
    preset: Annotated[Preset, typer.Option(help="Model size.")] = Preset.tiny,
    data: Annotated[
        Data, typer.Option(help="Microbatches by global index, or one stream per replica.")
    ] = Data.exact,
    seed: Annotated[int, typer.Option(help="Fixes parameters and data.")] = 0,
    policy: Annotated[
        Policy, typer.Option(help="Keep B, or let it shrink (the strawman).")
    ] = Policy.static,
    restore: Annotated[
        Restore, typer.Option(help="How in-place buckets are rewound.")
    ] = Restore.auto,
    dtype: Annotated[Dtype, typer.Option(help="Type of the parameters.")] = Dtype.float32,
    parallel: Annotated[Parallel, typer.Option(help="What a replica is made of.")] = Parallel[
        "plain"
    ],
    ranks_per_replica: Annotated[
        int | None,
        typer.Option(help="Ranks of one replica; default: 1, for FSDP 2, for 3d pp x ep x tp."),
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks (3d).")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages (3d).")] = 1,
    ep: Annotated[int, typer.Option(help="Expert-parallel ranks (3d, tiny_moe).")] = 1,
    schedule: Annotated[Schedule, typer.Option(help="Of the pipeline (3d).")] = Schedule["1f1b"],
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Norms on slices of the positions (3d).")
    ] = False,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Checkpoint the activations of blocks.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Run blocks through torch.compile.")
    ] = False,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Reduce in place, with snapshots.")
    ] = False,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Reduce beside the last backward pass.")
    ] = False,
    sequences: Annotated[int, typer.Option(help="Sequences in a microbatch.")] = 2,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 5,
    clip_norm: Annotated[float, typer.Option(help="Largest global gradient norm.")] = 1.0,
    bucket_mb: Annotated[float, typer.Option(help="Size of a gradient bucket in MiB.")] = 25.0,
    microbatch_ms: Annotated[
        float, typer.Option(help="Emulated device: least time of a microbatch.")
    ] = 0.0,
    bandwidth_mbps: Annotated[
        float, typer.Option(help="Emulated network between replicas; 0: none.")
    ] = 0.0,
    text: Texts = None,
    faults: Faults = None,
    out: Out = None,
) -> None:
    """Train the reference LLaMA-style model on real text."""
    given = dict(locals())
    from recover.train.session import run_training

    with _one_sentence():
        config = _settings(given)
        deaths = _checked_faults(faults, Mesh(replicas, config.ranks))
        status = run_training(config, out=out or _new_run("train"), faults=deaths)
    raise typer.Exit(status)


def _settings(given: Mapping[str, object]) -> TrainConfig:
    """Turn the options of ``train``, which are called like the settings, into these."""
    values = {k: str(v) if isinstance(v, StrEnum) else v for k, v in given.items()}
    del values["faults"], values["out"]
    files = cast(list[Path] | None, given["text"]) or []
    values["text"] = tuple(str(file.absolute()) for file in files)
    values["ranks_per_replica"] = given["ranks_per_replica"] or 0
    return TrainConfig(**values)  # type: ignore[arg-type]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory for both runs.", metavar="DIR")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train twice on real text, undisturbed and with replicas being killed, and compare."""
    from recover.train.demo import run_demo

    with _one_sentence():
        status = run_demo(out)
    raise typer.Exit(status)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.", metavar="RUN...")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="HTML file to write; default: report.html, in RUN if it is the only one."
        ),
    ] = None,
) -> None:
    """Write one HTML file that shows what happened in RUNs."""
    from recover.report import write_report

    with _one_sentence():
        page = out or (runs[0] if len(runs) == 1 else Path()) / "report.html"
        write_report(runs, page)
    print(page)


@faults_app.command()
def generate(
    replicas: Replicas = 4,
    ranks_per_replica: Annotated[int, typer.Option(help="Ranks of one replica.")] = 1,
    seed: Annotated[int, typer.Option(help="Same seed, same schedule.")] = 0,
    count: Annotated[int, typer.Option(help="Failures, each of another replica.")] = 1,
    first_step: Annotated[int, typer.Option(help="Earliest step.")] = 0,
    last_step: Annotated[int, typer.Option(help="Latest step.")] = 29,
    weights: Annotated[
        str, typer.Option(help="Location weights, such as 'reduce=8,optimizer=1'.")
    ] = "reduce=1",
) -> None:
    """Print a schedule: a pure function of the options."""
    from recover.core import schedule
    from recover.faults import dump, parse_weights

    with _one_sentence():
        made = schedule.generate(
            Mesh(replicas, ranks_per_replica),
            seed=seed,
            count=count,
            steps=range(first_step, last_step + 1),
            weights=parse_weights(weights),
        )
        parameters: dict[str, object] = {
            "replicas": replicas,
            "ranks_per_replica": ranks_per_replica,
            "seed": seed,
            "count": count,
            "steps": f"{first_step}..{last_step}",
            "weights": weights,
        }
        print(dump(made, parameters), end="")


@faults_app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The schedule.")],
    replicas: Replicas = 4,
    ranks_per_replica: Annotated[int, typer.Option(help="Ranks of one replica.")] = 1,
) -> None:
    """Say what a schedule will do, or what is wrong with it."""
    from recover.faults import explain, load

    with _one_sentence():
        mesh = Mesh(replicas, ranks_per_replica)
        print(explain(load(file, mesh), mesh))


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="Experiment, or all.")] = "all",
    explain: Annotated[bool, typer.Option("--list", help="Explain the experiments.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small runs, to see that it works.")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Directory of traces, tables and figures.", metavar="DIR")
    ] = Path("runs/bench"),
    replicas: Annotated[int | None, typer.Option(help="Model copies to start.")] = None,
    accumulation: Annotated[int | None, typer.Option(help="Microbatches per replica.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    failures: Annotated[int | None, typer.Option(help="Replicas to kill.")] = None,
    interval: Annotated[
        list[int] | None,
        typer.Option(help="Steps between failures or checkpoints (breakdown: repeatable)."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds of the reference, or rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="First seed.")] = None,
    preset: Annotated[Preset | None, typer.Option(help="Model size.")] = None,
    microbatch_ms: Annotated[
        float | None, typer.Option(help="Emulated device: least time of a microbatch.")
    ] = None,
    bandwidth_mbps: Annotated[
        float | None, typer.Option(help="Emulated network between replicas.")
    ] = None,
    restart_s: Annotated[
        float | None,
        typer.Option(help="Scale the emulated device to such a restart; 0: do not scale."),
    ] = None,
) -> None:
    """Reproduce the paper's evaluation: traces, CSV, figures and a section of a report."""
    given = dict(locals())
    from recover.evaluation import bench as series

    if explain:
        series.explain()
        return
    with _one_sentence():
        sizes = {k: v for k, v in given.items() if k in series.OPTIONS and v is not None}
        if interval:
            sizes["intervals"] = tuple(interval)
        if preset is not None:
            sizes["preset"] = str(preset)
        chosen = series.chosen(name)
        series.run_bench(series.Bench(experiments=chosen, out=out, quick=quick, sizes=sizes))


@app.command()
def doctor() -> None:
    """Say whether this machine is able to run a job, and if not, what to do."""
    from recover.launch.doctor import examine

    checks = examine()
    for found in checks:
        print(f"{'ok  ' if found.ok else 'FAIL'} {found.name}: {found.detail}")
        if not found.ok:
            print(f"     {found.remedy}")
    raise typer.Exit(0 if all(found.ok for found in checks) else 1)


class _one_sentence:
    """Turns a wrong setting into one sentence and exit status 2."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError | RecoverError):
            _refuse(str(error))


def _refuse(sentence: str) -> NoReturn:
    print(f"recover: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def _checked_faults(file: Path | None, mesh: Mesh) -> Path | None:
    """Return ``file`` once it is known to be right."""
    if file is None:
        return None
    from recover.faults import load

    load(file, mesh)
    return file.absolute()


def _new_run(name: str) -> Path:
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
