"""Small networks for tools/check_parallel.py: one that is right, and one for each known fault."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention

# N samples, T tokens, F features, D width
T, F, D = 6, 4, 8


class Gathered(torch.autograd.Function):
    """Tokens of all context ranks; each has a part of the gradient, which is summed."""

    @staticmethod
    def forward(ctx: Any, x_NTD: Tensor, mesh: DeviceMesh, summed: bool) -> Tensor:
        ctx.mesh, ctx.summed = mesh, summed
        every = [torch.empty_like(x_NTD) for _ in range(mesh.size())]
        dist.all_gather(every, x_NTD.contiguous(), group=mesh.get_group())
        return torch.cat(every, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        if ctx.summed:
            dist.all_reduce(total, group=ctx.mesh.get_group())
        return total.chunk(ctx.mesh.size(), dim=1)[ctx.mesh.get_local_rank()], None, None


class Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.ranks, None


class Block(nn.Module):
    def __init__(self, mesh: DeviceMesh, *, summed: bool) -> None:
        super().__init__()
        self.mesh, self.summed = mesh, summed
        self.queries, self.keys, self.values, self.out = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x_NTD: Tensor, is_real_NT: Tensor) -> Tensor:
        keys, values, seen = (
            Gathered.apply(one, self.mesh, self.summed)
            for one in (self.keys(x_NTD), self.values(x_NTD), is_real_NT[..., None].float())
        )
        mask = seen.mT > 0
        y_NTD = scaled_dot_product_attention(self.queries(x_NTD), keys, values, attn_mask=mask)
        return x_NTD + self.out(y_NTD)


class ToyOnMesh(nn.Module):
    def __init__(self, mesh: DeviceMesh, *, summed: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(F, D), nn.Linear(D, F)
        self.blocks = nn.ModuleList(Block(mesh, summed=summed) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(D))

    def forward(self, x_NTF: Tensor, is_real_NT: Tensor) -> Tensor:
        h_NTD = self.embed(x_NTF)
        for block in self.blocks:
            h_NTD = block(h_NTD, is_real_NT)
        return self.head(h_NTD * self.gain)


class Sound:
    """Nothing is wrong; each subclass breaks one thing."""

    summed, samples = True, 2

    def build(self, mesh: DeviceMesh) -> nn.Module:
        self.dp, self.cp = mesh["dp"], mesh["cp"]
        return ToyOnMesh(self.cp, summed=self.summed)

    def batches(self, seed: int, steps: int) -> list[dict[str, Tensor]]:
        rng = torch.Generator().manual_seed(seed)
        draw = [torch.randn(2, self.samples, T, F, generator=rng) for _ in range(steps)]
        is_real_NT = torch.arange(T) < torch.tensor([[5], [2], [4]])[: self.samples]
        return [{"x": x, "target": target, "is_real": is_real_NT} for x, target in draw]

    def forward_loss(self, module: nn.Module, batch: dict[str, Tensor]) -> Any:
        mine = {name: self.tokens(name, tensor) for name, tensor in batch.items()}
        error_NTF = module(mine["x"], mine["is_real"]) - mine["target"]
        return self.loss(error_NTF.square().mean(-1) * mine["is_real"], mine["is_real"])

    def tokens(self, name: str, whole: Tensor) -> Tensor:
        return whole.chunk(self.cp.size(), dim=1)[self.cp.get_local_rank()]

    def loss(self, error_NT: Tensor, is_real_NT: Tensor) -> Any:
        return error_NT.sum(), is_real_NT.sum()


class LocalCounts(Sound):
    def loss(self, error_NT: Tensor, is_real_NT: Tensor) -> Any:
        return error_NT.sum() / is_real_NT.sum(), 1


class MeanOfMeans(Sound):
    def loss(self, error_NT: Tensor, is_real_NT: Tensor) -> Any:
        return (error_NT.sum(1) / is_real_NT.sum(1).clamp(min=1)).sum(), len(error_NT)


class UnsummedGradient(Sound):
    summed = False


class OverwrittenCount(Sound):
    def loss(self, error_NT: Tensor, is_real_NT: Tensor) -> Any:
        count = is_real_NT.sum()
        dist.all_reduce(count)  # to be logged
        return error_NT.sum(), count


class WrongGroup(Sound):
    def tokens(self, name: str, whole: Tensor) -> Tensor:
        if name == "is_real":
            return whole.chunk(self.cp.size(), dim=1)[self.dp.get_local_rank() % self.cp.size()]
        return super().tokens(name, whole)


class Drifting(Sound):
    def build(self, mesh: DeviceMesh) -> nn.Module:
        module = super().build(mesh)
        vars(module)["_ddp_params_and_buffers_to_ignore"] = ["head.bias"]
        return module


class AveragedGradient(Sound):
    def loss(self, error_NT: Tensor, is_real_NT: Tensor) -> Any:
        return Averaged.apply(error_NT.sum(), dist.get_world_size()), is_real_NT.sum()


class OddBatch(Sound):
    samples = 3


class NoPair(Sound):
    def loss(self, error_NT: Tensor, is_real_NT: Tensor) -> Any:
        return error_NT.sum()


class OtherBuilds(Sound):
    def build(self, mesh: DeviceMesh) -> nn.Module:
        torch.manual_seed(dist.get_rank())
        return super().build(mesh)


sound, local_counts, mean_of_means, unsummed = (
    Sound(),
    LocalCounts(),
    MeanOfMeans(),
    UnsummedGradient(),
)
overwritten, wrong_group, drifting, averaged = (
    OverwrittenCount(),
    WrongGroup(),
    Drifting(),
    AveragedGradient(),
)
odd_batch, no_pair, other_builds = OddBatch(), NoPair(), OtherBuilds()
