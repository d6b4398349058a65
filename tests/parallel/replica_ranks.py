"""What the ranks of a replica do in the tests of the reference model's three axes.

Each function runs on all ranks and returns numbers; the one-process oracle runs next to it. The
gradients are bound, as the trainer binds them, to storage of ours before anything runs.
"""

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recover.parallel.shape import ReplicaShape
from recover.train.model import Decoder, ModelConfig, build
from recover.train.three_d import Replica, build_replica

SEED = 3
SEQUENCES = 4
PASSES = (4, 1, 2, 5)  # microbatches; 5 is no whole number of interleaved rounds of 2
DENSE = ModelConfig(vocab=64, layers=4, dim=32, heads=4, kv_heads=2, hidden=48, sequence=16)
SPARSE = ModelConfig(**(asdict(DENSE) | {"layers": 2, "experts": 4, "hidden": 16}))


def compare(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Compare every case, ``build_replica``'s arguments, with one process; name by name."""
    return {name: _compared(**case) for name, case in cases.items()}


def _compared(
    *, shape: dict[str, int], sparse: bool = False, untied: bool = False, **options: Any
) -> dict[str, Any]:
    config = SPARSE if sparse else DENSE
    if untied:
        config = ModelConfig(**(asdict(config) | {"tie_embeddings": False}))
    if "dtype" in options:
        options["dtype"] = getattr(torch, options["dtype"])
    replica = build_replica(
        config, ReplicaShape(**shape), sequences=SEQUENCES, seed=SEED, **options
    )
    oracle = build(config, seed=SEED, dtype=options.get("dtype", torch.float32))
    storage = bind(replica)
    worst, off_by, counts = 0.0, 0.0, []
    for number, length in enumerate(PASSES):
        passed = microbatches(config, number, length)
        losses = replica.run(passed)
        counts.append(len(losses))
        expected = run_alone(oracle, passed)
        off_by = max([off_by, *loss_errors(replica, losses, expected)])
        worst = max(worst, gradient_error(replica, oracle))
        for parameter, local in zip(parameters(replica), storage, strict=True):
            assert _local_gradient(parameter).data_ptr() == local.data_ptr(), "added in place"
            local.zero_()
    return {"gradient": worst, "loss": off_by, "counts": counts, **accounts(replica, oracle)}


def bind(replica: Replica) -> list[Tensor]:
    """Give every parameter a gradient of zeros to add into; return the local tensors."""
    storage = []
    for parameter in parameters(replica):
        if isinstance(parameter, DTensor):
            local = torch.zeros_like(parameter.to_local())
            parameter.grad = DTensor.from_local(
                local,
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        else:
            local = parameter.grad = torch.zeros_like(parameter)
        storage.append(local)
    return storage


def parameters(replica: Replica) -> list[nn.Parameter]:
    return [parameter for part in replica.parts for parameter in part.parameters()]


def microbatches(config: ModelConfig, number: int, length: int) -> list[Tensor]:
    """Return the microbatches of a pass, (SEQUENCES, sequence + 1) int64 each."""
    generator = torch.Generator().manual_seed(number)
    wanted = (length, SEQUENCES, config.sequence + 1)
    return list(torch.randint(0, config.vocab, wanted, generator=generator))


def run_alone(oracle: Decoder, passed: list[Tensor]) -> list[float]:
    """Leave the pass's gradients in the oracle; return its losses."""
    oracle.zero_grad()
    losses = []
    for tokens in passed:
        loss = oracle(tokens)
        loss.backward()
        losses.append(loss.item())
    return losses


def loss_errors(replica: Replica, losses: list[Tensor], expected: list[float]) -> list[float]:
    """Compare the mean over ep ranks of each microbatch's loss."""
    errors = []
    for loss, wanted in zip(losses, expected, strict=bool(losses)):
        assert loss.ndim == 0
        assert not loss.requires_grad
        total = loss.clone()
        dist.all_reduce(total, group=replica.mesh["ep"].get_group())
        errors.append(abs(total.item() / replica.shape.ep - wanted))
    return errors


def gradient_error(replica: Replica, oracle: Decoder) -> float:
    """Return the largest error of a parameter's gradient, relative to its largest element."""
    reduced = reduced_gradients(replica)
    errors = [0.0]
    for part in replica.parts:
        for name, parameter in part.named_parameters():
            whole = reduced[parameter]
            if isinstance(parameter, DTensor):
                whole = DTensor.from_local(
                    whole, parameter.device_mesh, parameter.placements
                ).full_tensor()
            wanted = oracle_gradient(oracle, name)
            errors.append(((whole - wanted).abs().max() / wanted.abs().max()).item())
    return max(errors)


def reduced_gradients(replica: Replica) -> dict[nn.Parameter, Tensor]:
    """Sum what is tied, as the trainer does after the reduction across replicas; local tensors."""
    reduced = {p: _local_gradient(p).clone() for p in parameters(replica)}
    for tie in replica.tied:
        for parameter in tie.parameters:
            dist.all_reduce(reduced[parameter], group=tie.group)
    return reduced


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor)
    assert gradient.placements == parameter.placements
    return gradient.to_local()


def oracle_gradient(oracle: Decoder, name: str) -> Tensor:
    named = dict(oracle.named_parameters())
    gradient = named["embedding.weight" if name not in named else name].grad
    assert gradient is not None
    return gradient


def accounts(replica: Replica, oracle: Decoder) -> dict[str, Any]:
    """Count elements by `Replica.copies`, and see that weights are the oracle's."""
    share = 0.0
    for part in replica.parts:
        for name, parameter in part.named_parameters():
            whole: Tensor = parameter
            if isinstance(parameter, DTensor):
                share += parameter.to_local().numel() / replica.copies(parameter)
                whole = parameter.full_tensor()
            else:
                share += parameter.numel() / replica.copies(parameter)
            original = dict(oracle.named_parameters()).get(name, oracle.embedding.weight)
            assert torch.equal(whole, original), name
    elements = torch.tensor(share, dtype=torch.float64)
    dist.all_reduce(elements)
    return {"elements": elements.item(), "of": sum(p.numel() for p in oracle.parameters())}


def frozen() -> dict[str, int]:
    """Freeze the first stage of two; count the gradients, and the losses of three passes."""
    replica = build_replica(
        DENSE, ReplicaShape(pp=2), sequences=SEQUENCES, seed=SEED, schedule="1f1b"
    )
    for part in replica.parts:
        part.requires_grad_(part.embedding is None)
    losses = [replica.run(microbatches(DENSE, 0, length)) for length in (4, 1, 2)]
    with_gradient = sum(p.grad is not None for p in parameters(replica))
    return {"losses": sum(map(len, losses)), "gradients": with_gradient}


def compare_two(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Do all that needs two ranks."""
    return {"cases": compare(cases), "frozen": frozen()}
