"""AdamW, its learning rate, and fp32 master weights for bf16 parameters.

Layer: `train`. Every replica runs this on the same reduced gradient and must end with the same
bits, so each function here depends on its arguments only, and the slower unfused update is taken:
it rounds in the order the text says, on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, overload

import torch
from torch import nn

from recover.train.config import TrainConfig

Group: TypeAlias = dict[str, Any]


_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def matrix_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that decay: all but norms and other 1-D tensors."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.ndim >= 2)


def parameter_groups(
    model: nn.Module, *, weight_decay: float, matrices: frozenset[str] | None = None
) -> list[Group]:
    """Split the trainable parameters: matrices decay, norms and other 1-D tensors do not.

    Frozen parameters are left out and a shared one appears once. ``matrices`` are the names that
    `matrix_names` gave before the model was wrapped: FSDP1 makes all parameters 1-D.
    """
    names = matrix_names(model) if matrices is None else matrices
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError(f"{type(model).__name__} has no trainable parameters")
    decayed = [p for name, p in trainable.items() if _unwrapped(name) in names]
    plain = [p for name, p in trainable.items() if _unwrapped(name) not in names]
    groups: list[Group] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(
    model: nn.Module,
    *,
    peak: float,
    matrices: frozenset[str] | None = None,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    epsilon: float = 1e-8,
) -> torch.optim.Optimizer:
    """Return AdamW for the model's trainable parameters, at learning rate `peak`.

    If any of them is not fp32, all are stepped through fp32 copies: see `MasterWeights`.
    """
    groups = parameter_groups(model, weight_decay=weight_decay, matrices=matrices)
    narrow = any(p.dtype != torch.float32 for group in groups for p in group["params"])
    construct = MasterWeights if narrow else _plain_adamw
    return construct(groups, lr=peak, betas=betas, eps=epsilon)


def _unwrapped(name: str) -> str:
    """Return a parameter's name without what wrappers have put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _plain_adamw(
    groups: list[Group], *, lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.AdamW:
    on_gpu = any(parameter.is_cuda for group in groups for parameter in group["params"])
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, foreach=on_gpu, fused=False)


class MasterWeights(torch.optim.Optimizer):
    """AdamW that keeps an fp32 copy of every parameter and steps the copy.

    A bf16 weight cannot take a change below about 1/256 of itself, which is most of the changes a
    small learning rate makes; the fp32 master adds them up and the weight is its rounding.

    `param_groups` holds the model's own parameters, so clipping, `zero_grad` and learning rates
    work as ever. Gradients are read from `parameter.grad` in whatever type they have. A weight
    that someone else wrote since the last step (a broadcast, a checkpoint) is taken over as the
    new master. `state_dict` has the usual form, with one more tensor, `master`, per parameter.
    """

    def __init__(
        self, groups: list[Group], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        masters = [
            {**group, "params": [nn.Parameter(p.detach().float().clone()) for p in group["params"]]}
            for group in self.param_groups
        ]
        self._inner = _plain_adamw(masters, lr=lr, betas=betas, eps=eps)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step the masters on the parameters' gradients and round them into the parameters.

        A parameter without a gradient is left alone, as AdamW does. Closures are not supported.
        """
        if closure is not None:
            raise ValueError("MasterWeights takes no closure; compute the gradients before step()")
        self._adopt()
        for parameter, master in self._pairs():
            grad = parameter.grad
            master.grad = None if grad is None else grad.float()
        self._inner.step()
        for parameter, master in self._pairs():
            master.grad = None
            parameter.copy_(master)
        return None

    @torch.no_grad()
    def state_dict(self) -> Group:
        """Return AdamW's state with `master` added; the tensors are this optimizer's own."""
        self._adopt()
        saved = self._inner.state_dict()
        state = {
            index: {**saved["state"].get(index, {}), "master": master.detach()}
            for index, (_, master) in enumerate(self._pairs())
        }
        return {**saved, "state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Group) -> None:
        """Take over what `state_dict` returned, and write the parameters from the masters."""
        pairs = list(self._pairs())
        saved = state_dict["state"]
        if sorted(saved) != list(range(len(pairs))) or any(
            "master" not in s for s in saved.values()
        ):
            raise ValueError(
                f"the state holds {len(saved)} parameters, this optimizer {len(pairs)}, "
                "and each needs a master"
            )
        moments = {
            index: {key: value for key, value in entry.items() if key != "master"}
            for index, entry in saved.items()
        }
        started = {index: entry for index, entry in moments.items() if entry}
        self._inner.load_state_dict({**state_dict, "state": started})
        for index, (parameter, master) in enumerate(pairs):
            master.copy_(saved[index]["master"])
            parameter.copy_(master)
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update({key: value for key, value in inner.items() if key != "params"})

    def _adopt(self) -> None:
        """Take over learning rates, and weights that are not the rounding of their master."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key != "params"})
        for parameter, master in self._pairs():
            ours = parameter == master.to(parameter.dtype)
            master.copy_(torch.where(ours, master, parameter.float()))

    def _pairs(self) -> Iterable[tuple[nn.Parameter, nn.Parameter]]:
        """Walk over (parameter, master), in the order of the state's indices."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            yield from zip(group["params"], inner["params"], strict=True)


def learning_rate(
    step: int, *, peak: float, warmup: int, steps: int, floor_fraction: float
) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    It rises linearly to `peak`, reached at step `warmup - 1`, falls as half a cosine from step
    `warmup` on, and would be `peak * floor_fraction` at step `steps`, where it stays.
    """
    if step < 0 or steps < 1 or not 0 <= warmup <= steps:
        raise ValueError(
            "step must be at least 0, steps at least 1 and warmup between 0 and steps, "
            f"got step={step}, steps={steps}, warmup={warmup}"
        )
    if not (peak > 0 and 0 <= floor_fraction <= 1):
        raise ValueError(
            "peak must be positive and floor_fraction between 0 and 1, "
            f"got peak={peak}, floor_fraction={floor_fraction}"
        )
    if step < warmup:
        return peak * (step + 1) / warmup
    if step >= steps:
        return peak * floor_fraction
    progress = (step - warmup) / (steps - warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (floor_fraction + (1.0 - floor_fraction) * cosine)


def rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate that a training run uses in a step."""
    return learning_rate(
        step,
        peak=config.learning_rate,
        warmup=min(config.warmup, config.steps),
        steps=config.steps,
        floor_fraction=0.1,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` for every parameter group from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr
