"""A mixture of SwiGLU experts that can be spread over ranks. Layer: train. Paper: 4.4.

Each token is worked on by the few experts that its router scores highest, whatever the load: no
capacity, so nothing is dropped and the result does not depend on how tokens are spread over ranks.

Expert parallel (EP): every rank of a group holds its slice of the experts and runs its own tokens.
Tokens are sorted by expert, sent to the ranks of their experts, worked on, sent back and put in
their old order. Everything moves by permutation and is summed in a fixed order, so that a rerun is
bit-identical; the two exchanges are each other's backward.

Axes: T tokens, N = T x (experts per token) assignments, M assignments received, X experts of the
whole model, L experts of this rank, P ranks of the group, D model width, F width of an expert.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


class MixtureOfExperts(nn.Module):
    """Route each token to ``per_token`` of ``experts`` and add what they say, weighted.

    The weights are the softmax over the chosen experts' scores, in fp32.
    """

    def __init__(self, *, dim: int, hidden: int, experts: int, per_token: int) -> None:
        super().__init__()
        self.per_token = per_token
        self.router = nn.Linear(dim, experts, bias=False)
        self.gate = nn.Parameter(torch.empty(experts, hidden, dim))
        self.up = nn.Parameter(torch.empty(experts, hidden, dim))
        self.output = nn.Parameter(torch.empty(experts, dim, hidden))
        self._group: dist.ProcessGroup | None = None

    def shard(self, mesh: DeviceMesh) -> None:
        """Keep this rank's slice of the experts, as DTensors Shard(0) over the 1-D ``mesh``.

        Raises ValueError where the experts cannot be shared out evenly.
        """
        experts, ranks = self.gate.shape[0], mesh.size()
        if experts % ranks:
            raise ValueError(f"experts={experts} is not a multiple of ep={ranks}")
        for name in ("gate", "up", "output"):
            whole = getattr(self, name)
            local = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(self, name, nn.Parameter(local, requires_grad=whole.requires_grad))
        self._group = mesh.get_group()

    def expert_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that ``shard`` spreads over ranks."""
        return [self.gate, self.up, self.output]

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # (T, D)
        scores, chosen = self.router(tokens).float().topk(self.per_token, dim=-1)  # (T, per_token)
        weights = scores.softmax(dim=-1).to(x.dtype)  # (T, per_token)
        repeated = tokens.unsqueeze(1).expand(-1, self.per_token, -1).flatten(0, 1)  # (N, D)
        expert = chosen.flatten()  # (N,)
        order = expert.argsort(stable=True)  # (N,)
        load = torch.bincount(expert, minlength=self.router.out_features)  # (X,)
        said = self._exchanged(repeated[order], load)[order.argsort()]  # (N, D)
        mixed = said.view(*chosen.shape, -1) * weights.unsqueeze(-1)  # (T, per_token, D)
        mixed_in: Tensor = mixed.sum(dim=1)  # (T, D)
        return mixed_in.view_as(x)

    def _exchanged(self, rows: Tensor, load: Tensor) -> Tensor:
        """Have rows, (N, D) sorted by expert with ``load`` of each, worked on, wherever that is."""
        if self._group is None:
            return self._worked(rows, load)
        ranks = self._group.size()
        incoming = torch.empty_like(load)  # (X,): from each rank, rows for each local expert
        dist.all_to_all_single(incoming, load, group=self._group)
        sent = load.view(ranks, -1).sum(dim=1).tolist()  # (P,)
        received = incoming.view(ranks, -1).sum(dim=1).tolist()  # (P,)
        arrived = exchange(rows, sent, received, self._group)  # (M, D), by rank, then expert
        local = torch.arange(len(load) // ranks, device=load.device).repeat(ranks)  # (X,)
        order = local.repeat_interleave(incoming).argsort(stable=True)  # (M,)
        worked = self._worked(arrived[order], incoming.view(ranks, -1).sum(dim=0))  # (M, D)
        return exchange(worked[order.argsort()], received, sent, self._group)  # (N, D)

    def _worked(self, rows: Tensor, load: Tensor) -> Tensor:
        """Apply this rank's experts to rows sorted by local expert, ``load``, (L,), of each."""
        gates, ups, outputs = (_local(weight).unbind() for weight in self.expert_parameters())
        parts = torch.split(rows, load.tolist())
        return torch.cat(
            [
                F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), output)
                for part, gate, up, output in zip(parts, gates, ups, outputs, strict=True)
            ]
        )


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; its gradient goes back the way the rows came."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        rows: Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.route = (received, sent, group)  # type: ignore[attr-defined]
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, gradient: Tensor
    ) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.route  # type: ignore[attr-defined]
        back = gradient.new_empty(sum(received), *gradient.shape[1:])
        dist.all_to_all_single(back, gradient.contiguous(), received, sent, group=group)
        return back, None, None, None


def exchange(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send ``sent[r]`` of the rows to each rank r of the group; return what came, by rank.

    Collective over the group, in forward and in backward; ``received[r]`` is what rank r sent.
    """
    arrived: Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
        rows, sent, received, group
    )
    return arrived
