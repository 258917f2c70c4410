"""Starts the processes, and the process groups of a layout, which functions take as arguments.

Without CUDA, Megatron-Core is first made to run on the CPU (`run_megatron_on_cpu`):

1. `torch.cuda` calls that Megatron-Core makes unconditionally answer for the CPU.
2. `torch.tensor`, `zeros`, `ones` and `full` take `device="cuda"` for the CPU; `.cuda()` returns
   the tensor, and `tensor.type()` names CUDA. (A TorchFunctionMode would cover every call, but
   makes each function of torch three times as slow: 20% of a small run.)
3. The random-number tracker keeps torch's CPU generator.

With and without CUDA, Megatron-Core's sum over tensor ranks is replaced by
`_sum_over_tensor_ranks`.

Megatron-Core creates the groups of all its features, including experts and embeddings that stages
share. All ranks join each call, and a group costs threads, and GPU memory once NCCL has a
communicator for it. So unused groups share a used group with the same ranks.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store, _get_default_store

from dit.config import ModelConfig
from dit.distributed.cpu_threads import BY_USER, CGROUP, about_threads, usable_cores
from dit.distributed.cuda_environment import set_cuda_environment
from dit.distributed.entry import say_notice
from dit.launched import check_launch, is_alone, local_rank, meet, meets_others, rank, world_size
from dit.parsing import cause

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


_CPU = torch.device("cpu")
_CUDA_NAMES = ("cuda", "cuda:0")
_MADE_ON_CUDA = ("tensor", "zeros", "ones", "full")
"""Functions of torch to which Megatron-Core passes device="cuda" on every machine."""
_UNUSED = {
    "DATA_PARALLEL_GROUP",  # only its size is used; sums go over the group with context ranks
    "EMBEDDING_GROUP",
    "EXPERT_DATA_PARALLEL_GROUP",
    "EXPERT_MODEL_PARALLEL_GROUP",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP",  # from Megatron-Core 0.19 on
    "EXPERT_TENSOR_PARALLEL_GROUP",
    "POSITION_EMBEDDING_GROUP",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP",
    "TENSOR_AND_DATA_PARALLEL_GROUP",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
}
"""Megatron-Core's names of groups in which no message is sent. Each still has all its ranks, so a
message that a later version of Megatron-Core sends would arrive."""


def device() -> torch.device:
    """The accelerator of this process; the CPU without one."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank())
    return torch.device("cpu")


def broadcast(tensor: Tensor, group: dist.ProcessGroup, *, source: int) -> None:
    """Overwrites `tensor` on all ranks of `group` with that of `source`, a rank within the group.

    The tensor may be in device or host memory.
    """
    there = tensor.detach().to(device())  # where NCCL can send it
    # As bytes, because back ends differ in the types that they know.
    dist.broadcast(there.view(-1).view(torch.uint8), group=group, group_src=source)
    if there.device != tensor.device:
        tensor.detach().copy_(there)


def device_memory() -> int | None:
    """Bytes of memory of this process's accelerator; None without one."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(device()).total_memory


def start_processes(
    *, seed: int, model: ModelConfig, dp_replicate_size: int = 1, limit_s: float = 600.0
) -> None:
    """Joins the launcher's process group (or creates one) and prepares Megatron-Core.

    The back end is NCCL with CUDA, and gloo without. A program may open several checkpoints: a
    second call creates the groups of the new layout of `model`. `seed` is that of Megatron-Core's
    random-number tracker. `limit_s` is the time in seconds within which all processes must join.

    Raises:
        LaunchError: the variables of the launcher are incomplete or wrong.
        TimeoutError: names the ranks that did not join.
    """
    check_launch()
    set_cuda_environment()
    run_megatron_on_cpu()
    from megatron.core.tensor_parallel import mappings, model_parallel_cuda_manual_seed

    mappings._reduce = _sum_over_tensor_ranks
    target = device()
    if target.type == "cuda":
        torch.cuda.set_device(target)
    # Longer than the watchdog's limit: it names the process that keeps the others waiting.
    timeout = timedelta(seconds=limit_s + 60)
    if not dist.is_initialized():
        if target.type == "cpu" and not BY_USER:
            _say_threads()
        _join_group(target, timeout, timedelta(seconds=limit_s))
    make_groups(model, dp_replicate_size=dp_replicate_size, timeout=timeout)
    model_parallel_cuda_manual_seed(seed)


def _sum_over_tensor_ranks(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `part` over `group`, in a new tensor; replaces Megatron-Core's all-reduce.

    Tensor-parallel linears call it, forward and backward. Megatron-Core's own function writes the
    sum into `part`, although a gradient may also belong to another branch of the graph (both terms
    of an addition share one tensor). Until version 0.16, Megatron-Core's function returns tensors
    that are not contiguous, such as expanded gradients, without summing them.
    """
    if group.size() == 1:
        return part
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _join_group(target: torch.device, timeout: timedelta, meeting: timedelta) -> None:
    """Joins the process group; all processes must join within the time `meeting`."""
    launched = meets_others() and not is_alone()
    join = partial(
        dist.init_process_group,
        init_method=None if launched else "tcp://127.0.0.1:0",
        rank=rank(),
        world_size=world_size(),
        timeout=timeout,
    )
    if launched:
        # Without `device_id`: with it, NCCL would create a communicator for each group at once,
        # used or not, in calls that all ranks join: about 2,000 calls on 1,024 ranks.
        join("nccl" if target.type == "cuda" else "gloo", store=meet(meeting))
    elif target.type == "cuda":
        _join_alone(join, target)
    else:
        join("gloo")


def _join_alone(join: Callable[..., None], target: torch.device) -> None:
    """Starts a process group of this process only, with gloo if NCCL finds no network."""
    try:
        join("nccl", device_id=target)  # NCCL starts now, not at the first collective
    except RuntimeError as error:
        say_notice(f"NCCL does not start ({cause(error)}); this single process uses gloo instead")
        join("cpu:gloo,cuda:gloo")


def make_groups(model: ModelConfig, *, dp_replicate_size: int = 1, timeout: timedelta) -> None:
    """Creates Megatron-Core's groups of the layout of `model`, in place of an earlier layout's."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    virtual = model.virtual_stages
    with sharing_unused_groups():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=model.tensor_model_parallel_size,
            pipeline_model_parallel_size=model.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
            context_parallel_size=model.context_parallel_size,
            num_distributed_optimizer_instances=dp_replicate_size,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=math.ceil(timeout.total_seconds() / 60),
        )


@contextmanager
def sharing_unused_groups() -> Iterator[None]:
    """A context in which Megatron-Core creates fewer process groups.

    All unused groups with the same ranks become one, which is a used group of these ranks if there
    is one. Used groups keep separate communicators, because two that send at the same time must not
    wait for each other. A group with a single rank is created by that rank alone: otherwise all
    ranks would join as many calls as there are ranks.
    """
    from megatron.core import parallel_state

    original: Any = parallel_state.create_group
    parallel_state.create_group = _shared(original)
    try:
        yield
    finally:
        parallel_state.create_group = original


def _shared(create: Callable[..., Any]) -> Callable[..., Any]:
    made: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    used: dict[tuple[int, ...], int] = defaultdict(int)  # how many of them used groups have taken

    def create_or_share(ranks: Sequence[int], *arguments: Any, **options: Any) -> Any:
        """The group of `ranks`: a new one, or an existing one with the same ranks.

        All ranks request all groups in the same order, so all decide alike.
        """
        key = tuple(ranks)
        alone = len(key) == 1
        if alone and dist.get_rank() not in key:
            return dist.GroupMember.NON_GROUP_MEMBER
        free = alone or options.get("group_desc") in _UNUSED
        taken = 0 if free else used[key]
        if taken == len(made[key]):
            options |= {"use_local_synchronization": True} if alone else {}
            made[key].append(create(ranks, *arguments, **options))
        used[key] += not free
        return made[key][taken]

    return create_or_share


def _say_threads() -> None:
    line = about_threads(
        CGROUP, threads=torch.get_num_threads(), cores=usable_cores(), load=os.getloadavg()[0]
    )
    if line is not None:
        say_notice(line)


def process_groups() -> ProcessGroupCollection:
    """All process groups of the present layout, as Megatron-Core's collection."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


def store_connection() -> Store:
    """The process group's store over a new connection, which no other thread can block."""
    store: Any = _get_default_store()
    return store.clone()


class _NoStream:
    """Stands for a CUDA stream on a CPU, where operations run in order anyway."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def wait_stream(self, _: _NoStream) -> None:
        pass


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps `make`, a function that creates a tensor, so that `device="cuda"` means the CPU."""

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        if str(kwargs.get("device")) in _CUDA_NAMES:
            kwargs["device"] = _CPU
        return make(*args, **kwargs)

    return made


def _named_cuda(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `Tensor.type` to return CUDA's names of dtypes, by which Megatron-Core sorts."""

    @wraps(type_of)
    def named(*args: Any, **kwargs: Any) -> Any:
        found = type_of(*args, **kwargs)
        # A TorchFunctionMode calls this function once more, since torch looks it up by its name.
        on_cpu = isinstance(found, str) and not found.startswith("torch.cuda.")
        return found.replace("torch.", "torch.cuda.", 1) if on_cpu else found

    return named


def _get_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(new_state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(new_state)


@cache
def run_megatron_on_cpu() -> None:
    """Makes Megatron-Core usable in this process without CUDA; does nothing with CUDA."""
    if torch.cuda.is_available():
        return
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    # Megatron-Core reduces gradients over copies of the optimizer state on a stream of its own.
    torch.cuda.Stream = _NoStream  # type: ignore[assignment, misc]
    torch.cuda.default_stream = _NoStream  # type: ignore[assignment]
    torch.cuda.stream = lambda *_: nullcontext()  # type: ignore[assignment]
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment, return-value]
    torch.cuda.get_rng_state = _get_state
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    # `with torch.device(...)` knows functions by identity, and looks them up at its first use.
    with _CPU:
        torch.empty(0)
    for name in _MADE_ON_CUDA:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    torch.Tensor.type = _named_cuda(torch.Tensor.type)  # type: ignore[method-assign]

    # Megatron-Core compiles fused functions where it declares them, used or not. Without that, the
    # compiler is not imported: two seconds of each start.
    torch.compile, compile_later = lambda function, **_: function, torch.compile  # type: ignore[assignment]
    import megatron.core.tensor_parallel.random as random

    torch.compile = compile_later
    random._get_cuda_rng_state = _get_state
    random._set_cuda_rng_state = _set_state
