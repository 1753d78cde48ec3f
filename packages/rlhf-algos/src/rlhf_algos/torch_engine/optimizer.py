"""AdamW with float32 master weights, warm-up schedules, clipping and a state that resumes bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from rlhf_core import OptimizerConfig, learning_rate
from torch import Tensor, nn


class MasterAdamW:
    """AdamW over `parameters`; those in 16 bits are updated through float32 copies."""

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> None:
        self.config = config
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._masters = [
            p.detach().float().clone().requires_grad_() if p.dtype in (torch.bfloat16, torch.float16) else p
            for p in self.parameters
        ]
        decayed = [master for master in self._masters if master.dim() > 1]
        plain = [master for master in self._masters if master.dim() <= 1]
        self.adam = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": config.weight_decay},
                # Norms and biases are not pulled towards zero.
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self.steps = 0
        """Optimizer steps taken."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self.config, self.steps)

    def gradient_norm(self) -> Tensor:
        """Global norm of all gradients, float32 scalar."""
        norms = [p.grad.float().norm() for p in self.parameters if p.grad is not None]
        return torch.stack(norms).norm() if norms else torch.zeros(())

    def step(self, norm: float) -> None:
        """Clip by the global `norm`, update, and drop the gradients."""
        limit = self.config.max_grad_norm
        scale = limit / norm if limit and norm > limit else 1.0
        for parameter, master in zip(self.parameters, self._masters, strict=True):
            if parameter.grad is None:
                continue
            if master is not parameter:
                master.grad = parameter.grad.float()
            if scale != 1.0:
                master.grad.mul_(scale)  # type: ignore[union-attr]
        for group in self.adam.param_groups:
            group["lr"] = self.learning_rate
        self.adam.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self._masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
                    master.grad = None
        self.zero_grad()
        self.steps += 1

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Moments, master weights and the step count."""
        masters = [m.detach() for m, p in zip(self._masters, self.parameters, strict=True) if m is not p]
        return {"adam": self.adam.state_dict(), "masters": masters, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.adam.load_state_dict(state["adam"])
        own = [m for m, p in zip(self._masters, self.parameters, strict=True) if m is not p]
        with torch.no_grad():
            for master, saved in zip(own, state["masters"], strict=True):
                master.copy_(saved)
        self.steps = int(state["steps"])

    def move(self, device: torch.device) -> None:
        """Bring moments and masters to a device; the parameters are the model's business."""
        for master, parameter in zip(self._masters, self.parameters, strict=True):
            if master is not parameter:
                master.data = master.data.to(device)
            for name, value in self.adam.state.get(master, {}).items():
                if isinstance(value, Tensor):
                    self.adam.state[master][name] = value.to(device)
