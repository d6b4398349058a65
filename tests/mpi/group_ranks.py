"""Rank side of the process group's tests: one job of five ranks, of which three die."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from recover.core.mesh import Mesh
from recover.errors import RecoverError
from recover.mpi.process_group import ProcessGroupUlfm, held_group, register
from recover.mpi.transport import UlfmTransport, join
from recover.mpi.work import WorkUlfm

torch.set_num_threads(1)


def play() -> dict[str, Any]:
    """Go through all parts; an assertion that fails is the rank's result."""
    transport = join(Mesh(5))
    _refuse_replicas_of_two()
    return {
        "healthy": healthy(transport),
        "ddp": death_in_ddp(transport, victim=1),
        "stream": death_in_a_stream(transport, victim=4),
        "held": death_in_a_held_group(transport, victim=0),
        "end": transport.agree(True),
    }


def healthy(transport: UlfmTransport) -> dict[str, Any]:
    """Every collective of torch.distributed over the backend, and training with plain DDP."""
    register()
    rank, size = transport.cross_rank, transport.cross_size
    dist.init_process_group("ulfm", store=HashStore(), rank=rank, world_size=size)
    assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("ulfm", rank, size)
    _check_reductions(rank, size)
    _check_copies(rank, size)
    _check_refusals()
    group = dist.group.WORLD
    assert isinstance(group, ProcessGroupUlfm)
    _check_quiet(group)
    model = _model(None, rank)
    losses = [loss for loss, _ in _steps(model, 3)]
    weights = [p.sum().item() for p in model.parameters()]
    dist.destroy_process_group()
    return {"losses": losses, "weights": weights, "epoch": group.epoch}


def death_in_ddp(transport: UlfmTransport, *, victim: int) -> dict[str, Any]:
    """A rank dies in a backward pass of plain DDP; the group is passed as an object."""
    group = ProcessGroupUlfm(transport)
    me = transport.place.replica
    model = _model(group, me)
    failures = []
    for _, step in _steps(model, 4):
        failures.append([group.ulfm_consensus().has_failures(), group.epoch])
        if (me, step) == (victim, 0):
            model.module[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    return {"last": failures[-1], "members": [group.rank(), group.size()]}


def death_in_a_stream(transport: UlfmTransport, *, victim: int) -> dict[str, Any]:
    """Guarded reductions without a trainer, in which a rank dies."""
    group = ProcessGroupUlfm(transport)
    me = transport.place.replica
    records: list[Any] = []
    sums: list[float] = []
    for step in range(4):
        if (me, step) == (victim, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        tensor = torch.full((50_000,), me + 1.0)
        works = [group.ulfm_allreduce(tensor), group.ulfm_consensus()]
        records += [[w.epoch, w.survivors, w.failed_ranks] for w in works if w.record]
        if not any(work.has_failures() for work in works):
            (total,) = set(tensor.tolist())
            sums.append(total)
    return {"records": records, "sums": sums}


def death_in_a_held_group(transport: UlfmTransport, *, victim: int) -> dict[str, Any]:
    """A held group repairs nothing; its owner does."""
    group = held_group(transport)
    assert held_group(transport) is group
    if transport.place.replica == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = torch.ones(4)
    works = [group.allreduce([tensor]), group.broadcast([tensor], _root(0))]
    failed = [work.has_failures() for work in works]
    quiet = [group.quiet, group.size(), transport.agree(True)]
    epoch = transport.shrink()
    after = group.allreduce([torch.ones(4)])
    mended = [group.quiet, group.size(), after.has_failures(), after.result()[0].tolist()]
    return {"failed": failed, "quiet": quiet, "epoch": epoch, "mended": mended}


def _check_reductions(rank: int, size: int) -> None:
    total = size * (size + 1) // 2
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8):
        _equal(_reduced(torch.full((3, 5), rank + 1, dtype=dtype)), total)
    for dtype in (torch.bfloat16, torch.float16, torch.int16, torch.int8):
        _equal(_reduced(torch.full((4,), rank + 1, dtype=dtype)), total)
    _equal(_reduced(torch.tensor([rank == 0, False])), torch.tensor([True, False]))
    _equal(_reduced(torch.full((2, 6), rank + 1.0).t()[::2]), total)  # not contiguous
    _equal(_reduced(torch.tensor(rank + 1.0)), total)
    _equal(_reduced(torch.empty(0)), torch.empty(0))
    _equal(_reduced(torch.full((2,), float(rank)), dist.ReduceOp.MAX), size - 1)
    _equal(_reduced(torch.full((2,), rank + 1), dist.ReduceOp.MIN), 1)
    _equal(_reduced(torch.full((2,), rank + 1.0), dist.ReduceOp.AVG), total / size)
    parameter = nn.Parameter(torch.full((3,), rank + 1.0))
    dist.all_reduce(parameter)
    _equal(parameter.detach(), total)
    pair = [torch.full((2,), rank + 1.0), torch.full((3,), rank + 2.0)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_reduce_coalesced(pair)
    _equal(pair[0], total)
    _equal(pair[1], total + size)
    mine = torch.full((2,), rank + 1.0)
    dist.reduce(mine, dst=1)
    _equal(mine, total if rank == 1 else rank + 1.0)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert isinstance(work, WorkUlfm)
    assert (work.has_failures(), work.failed_ranks, work.survivors) == (False, (), None)
    assert (work.is_completed(), work.is_success(), work.wait()) == (True, True, True)
    _equal(work.get_future().value()[0], size)


def _check_copies(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int8):
        tensor = torch.full((3,), rank == 1).to(dtype)
        dist.broadcast(tensor, src=1)
        _equal(tensor, 1)
        gathered = [torch.empty(3, dtype=dtype) for _ in range(size)]
        dist.all_gather(gathered, torch.full((3,), rank == 2).to(dtype))
        for other, row in enumerate(gathered):
            _equal(row, int(other == 2))
    rows = torch.empty(size * 2)
    dist.all_gather_into_tensor(rows, torch.tensor([rank, rank + 0.5]))
    _equal(rows, torch.tensor([r + half for r in range(size) for half in (0.0, 0.5)]))
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    dist.barrier()


def _check_refusals() -> None:
    one = torch.ones(1)
    group = dist.group.WORLD
    assert group is not None
    calls: list[Callable[[], object]] = [
        lambda: dist.send(one, (dist.get_rank() + 1) % dist.get_world_size()),
        lambda: dist.all_reduce(one, dist.ReduceOp.PRODUCT),
        lambda: dist.all_reduce(one.to(torch.complex64).to_sparse()),
        lambda: dist.new_group([0, 1]) if dist.get_rank() < 2 else _refuse(),
    ]
    for call in calls:
        try:
            call()
        except RecoverError:
            continue
        raise AssertionError("was not refused")


def _refuse() -> None:
    raise RecoverError("not a member")


def _check_quiet(group: ProcessGroupUlfm) -> None:
    group.set_quiesce(True)
    tensor = torch.ones(2)
    work = group.ulfm_allreduce(tensor)
    assert (work.has_failures(), work.record) == (True, None)
    _equal(tensor, 1)
    group.set_quiesce(False)
    assert not group.ulfm_allreduce(tensor).has_failures()
    assert not group.ulfm_consensus().has_failures()


def _reduced(tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    dist.all_reduce(tensor, operation)
    return tensor


def _equal(tensor: Tensor, expected: Tensor | float) -> None:
    wanted = expected if isinstance(expected, Tensor) else torch.full_like(tensor, expected)
    assert torch.equal(tensor, wanted), f"{tensor} is not {wanted}"


def _model(group: dist.ProcessGroup | None, rank: int) -> DistributedDataParallel:
    torch.manual_seed(rank)  # DDP makes the replicas equal
    layers = nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Tanh(), nn.Linear(300, 1))
    return DistributedDataParallel(layers, process_group=group, bucket_cap_mb=0.001)


def _steps(model: DistributedDataParallel, steps: int) -> Iterator[tuple[float, int]]:
    for step in range(steps):
        inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().mean()  # equal inputs: every rank has the same loss
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():  # torch.optim takes seconds to import
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None
        yield loss.item(), step


def _refuse_replicas_of_two() -> None:
    class Transport:
        mesh = Mesh(2, 2)

    try:
        ProcessGroupUlfm(Transport())  # type: ignore[arg-type]
    except ValueError:
        return
    raise AssertionError("was not refused")


def _root(rank: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options
