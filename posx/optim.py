"""Which parameter is trained by what.

Muon (Jordan et al. 2024) orthogonalises the update of a matrix; it trains the matrices of the
blocks. AdamW trains the rest: embedding, head, norms, biases, and whatever a scheme learns."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from posx.config import OptimConfig
from posx.model import Transformer
from posx.muon import Muon


def make_optimizers(config: OptimConfig, model: Transformer) -> list[Optimizer]:
    """One or two optimizers; each group keeps its peak learning rate under `peak`."""
    matrices = [p for p in block_matrices(model) if p.requires_grad]
    chosen = {id(p) for p in matrices}
    head = [] if model.head is None else [model.head.weight]
    chosen_head = {id(p) for p in head}
    others = [p for p in model.parameters() if id(p) not in chosen | chosen_head]
    betas = (config.beta1, config.beta2)
    groups = [
        {"params": head, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizers: list[Optimizer] = []
    if config.matrices == "muon":
        optimizers.append(Muon(matrices, config.matrix_lr, config.weight_decay))
    else:
        groups.append(
            {"params": matrices, "weight_decay": config.weight_decay, "lr": config.matrix_lr}
        )
    optimizers.append(torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def block_matrices(model: Transformer) -> list[Tensor]:
    """The weights of the linear layers inside the blocks, without a scheme's parameters."""
    return [
        linear.weight
        for block in model.layers
        for linear in (
            block.attention.query,
            block.attention.key,
            block.attention.val,
            block.attention.out,
            block.up,
            block.down,
        )
    ]


def set_rate(optimizers: list[Optimizer], fraction: float) -> None:
    """Set every learning rate to a fraction of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * fraction
