"""Runs a forward pass of a network on a layout, with a type for each tensor.

1. declare_rules   the effect of Megatron-Core's and our autograd functions on types
2. trial           one rank's part of a tiny network on a layout, and a pack
3. weight_traits   for each weight, measured: which ranks hold it, sum its gradient and count it in
                   the norm; its type follows
4. disagreements   contradictions between shards, sums and the norm of the gradient
5. check           the pass, its loss and the divisor of the loss, by these types

`tools.gradient_types` explains the types, and is the command.
"""

# T packed tokens, N samples, M level rows

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import cache, partial
from itertools import islice
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel import layers, mappings
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dit.config import RunConfig
from dit.config_loading import load_config
from dit.data import build_train_loader, null_inputs
from dit.distributed.model_parallel import Item, rank_part
from dit.distributed.process_groups import make_groups, process_groups, run_megatron_on_cpu
from dit.layout_check.names import NamedLayout, kind_settings, parse_layout
from dit.lora.targets import chosen_adapters
from dit.models.layers.queries_and_keys import _SumOverRanks
from dit.models.stacks import joint_transformer, step_layer
from dit.objectives.registry import training_objective
from dit.objectives.training_target import training_problem
from dit.train import loss as losses
from dit.train.model_and_optimizer import build_model, randomise, weight_shards
from recipes.check_layouts import layout_check

spmd: Any = importlib.import_module("spmd_types")  # it does not mark what it exports
checker: Any = importlib.import_module("spmd_types.checker")
I, P, R, S, V, rules = spmd.I, spmd.P, spmd.R, spmd.S, spmd.V, spmd.rules  # noqa: E741

LOCAL = {
    "dit.lora.adapter": ("_Narrowed", "_Widened", "_Dropped"),
    "dit.models.attention.cubes": ("_Take", "_PlacedWithMeans"),
    "dit.models.layers.context_parallel": ("_Permute",),
    "dit.models.layers.per_sample": ("_Rectangles", "_LookUp"),
    "dit.models.layers.queries_and_keys": ("_Normalised", "_Rotate"),
    "dit.models.stacks.frozen_blocks": ("_Product",),
}
"""Our autograd functions without communication, by module: their outputs vary over ranks where an
input does."""


def _column_linear(
    *,
    input: Any,
    weight: Any,
    bias: Any,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,
) -> Any:
    """The rule for Megatron-Core's linear with split outputs: returns its output with its type.

    With `sequence_parallel` the input's rows are gathered first.
    """
    if sequence_parallel:
        input = rules.all_gather(input, tp_group, src=S(0), dst=R)
    elif allreduce_dgrad:
        input = rules.convert(input, tp_group, src=I, dst=R)
    product = rules.einsum("ti,oi->to", input, weight)
    return product if bias is None else rules.einsum("to,o->to", product, bias)


def _frozen_column_linear(
    *, input: Any, weight: Any, bias: Any, allreduce_dgrad: bool, tp_group: Any
) -> Any:
    """The rule for Megatron-Core's linear with a frozen weight: returns its output with its type.

    The caller has gathered the input.
    """
    none = {"sequence_parallel": False, "allreduce_dgrad": allreduce_dgrad, "tp_group": tp_group}
    return _column_linear(input=input, weight=weight, bias=bias, **none)


def _gathered_rows(*, input_: Any, group: Any, tensor_parallel_output_grad: bool) -> Any:
    return rules.all_gather(input_, group, src=S(0), dst=R if tensor_parallel_output_grad else I)


def _sends(rule: Any, src: Any, dst: Any) -> Callable[..., Any]:
    return lambda *, input_, group: rule(input_, group, src=src, dst=dst)


RULES: Mapping[Any, Callable[..., Any]] = {
    mappings._CopyToModelParallelRegion: _sends(rules.convert, I, R),
    mappings._ReduceFromModelParallelRegion: _sends(rules.all_reduce, V, I),
    mappings._GatherFromModelParallelRegion: _sends(rules.all_gather, S(-1), I),
    mappings._AllGatherFromTensorParallelRegion: _sends(rules.all_gather, S(-1), R),
    mappings._ScatterToSequenceParallelRegion: _sends(rules.convert, I, S(0)),
    mappings._GatherFromSequenceParallelRegion: _gathered_rows,
    mappings._ReduceScatterToSequenceParallelRegion: _sends(rules.reduce_scatter, V, S(0)),
    mappings._AllToAll: lambda *, input, group: rules.all_to_all(input, group),
    layers.LinearWithGradAccumulationAndAsyncCommunication: _column_linear,
    layers.LinearWithFrozenWeight: _frozen_column_linear,
    _SumOverRanks: lambda *, x, group: rules.all_reduce(x, group, src=V, dst=R),
}
"""Rules of functions with communication: how they change the type of their input, in the forward
pass and for the gradient at once."""


@cache
def declare_rules() -> None:
    """Registers autograd functions with spmd_types, once in a process."""
    for function, rule in RULES.items():
        function.spmd_typecheck = staticmethod(rule)
        spmd.register_autograd_function(function)
    for module, names in LOCAL.items():
        for name in names:
            spmd.register_local_autograd_function(getattr(importlib.import_module(module), name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """How the tensor-parallel ranks treat a weight and its gradient."""

    type: Any  # I, R or V, from the marks and sums that follow
    split: bool  # its shard in a checkpoint, and its matrix for Muon, is a part of the whole
    summed: bool  # Megatron-Core adds its gradients of all tensor ranks after the backward pass
    counted: bool  # the gradient norm also counts the weight's gradient on a second tensor rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One rank's part of a network on a layout, and a pack to run it on."""

    layout: NamedLayout
    config: RunConfig
    groups: Any
    chunk: Any  # the network under data parallelism
    item: Item

    @property
    def network(self) -> Any:
        return self.chunk.module

    @property
    def tensor(self) -> bool:
        return self.groups.tp.size() > 1


def trial(size: str, name: str, overrides: Sequence[str] = ()) -> Trial:
    """Builds one rank of the tiny network `size` on the layout `name`, and a pack for it.

    The weights are random.

    It starts a process group with torch's `fake` back end; an earlier one is destroyed.

    Raises:
        Problems: the layout does not divide the network.
    """
    declare_rules()
    layout, base = parse_layout(name), layout_check()
    lines = [
        *kind_settings(size, base.dataset.mock_samples),
        "dataset.max_bad_fraction=1",
        *overrides,
    ]
    config = layout.of(load_config(base, config_file=None, overrides=lines))
    if dist.is_initialized():
        dist.destroy_process_group()
    run_megatron_on_cpu()
    dist.init_process_group("fake", rank=1, world_size=layout.size, store=FakeStore())
    make_groups(config.model, timeout=timedelta(minutes=1))
    groups = process_groups()
    adapters = chosen_adapters(config.model, config.lora) if config.lora.enabled else None
    (chunk,) = build_model(
        config, groups, fill=partial(randomise, seed=config.rng.seed), adapters=adapters
    )
    loader = build_train_loader(config, rank=0, world_size=1)
    (pack,) = islice(loader, 1)
    loader.close()
    more: Any = {"options": config.objective, "route": config.model.token_route}
    null = null_inputs(config, torch.device("cpu"))
    objective = training_objective(config.objective)
    batch, problem = training_problem(objective, pack, seed=1, step=1, null=null, **more)
    if layout.pairs:
        problem = replace(problem, reference_N=torch.ones(batch.num_samples, dtype=torch.float64))
    network: Any = chunk.module
    item = rank_part(network, (batch, problem))
    return Trial(layout=layout, config=config, groups=groups, chunk=chunk, item=item)


def weight_traits(given: Trial) -> dict[str, Traits]:
    """The traits of each weight of the network, by name; all but the type are measured.

    The gradients are overwritten.
    """
    shapes: dict[int, tuple[int, ...]] = {
        id(shard.data): shard.global_shape[shard.prepend_axis_num :]
        for shard in weight_shards(given.network)
    }
    summed, found = _summed(given), {}
    for name, weight in given.network.named_parameters():
        marked = getattr(weight, "tensor_model_parallel", False)
        split = shapes.get(id(weight), weight.shape) != tuple(weight.shape)
        counted = layers.param_is_not_tensor_parallel_duplicate(weight, tp_group=given.groups.tp)
        kind = R if name in summed else V if marked else I
        found[name] = Traits(type=kind, split=split, summed=name in summed, counted=counted)
    return found


def _summed(given: Trial) -> set[str]:
    """Names of the weights whose gradients Megatron-Core sums over tensor ranks after backward.

    To find them, this function sets each gradient to 1 and runs that step with a sum that doubles.
    The gradients are overwritten.
    """
    weights = {n: w for n, w in given.network.named_parameters() if w.requires_grad}
    for weight in weights.values():
        weight.main_grad.fill_(1)

    def doubled(tensor: Tensor, *_: Any, group: Any = None, **__: Any) -> None:
        if group is given.groups.tp:
            tensor.mul_(2)

    with patch.object(dist, "all_reduce", doubled):
        finalize_model_grads([given.chunk], pg_collection=given.groups)
    return {name for name, weight in weights.items() if (weight.main_grad == 2).all()}


def disagreements(given: Trial, traits: Mapping[str, Traits]) -> list[str]:
    """Contradictions about a weight between its shard, the sum of its gradient and the norm.

    Returns one line for each. Without tensor parallelism there are none.
    """
    if not given.tensor:
        return []
    found = []
    for name, of in traits.items():
        split = of.type is V
        if of.split is not split:
            found.append(f"{name}: its shard is {'a part' if of.split else 'whole'}, its mark not")
        if of.counted is not split:
            found.append(
                f"{name}: {of.type}, and the norm counts {'all ranks' * of.counted or 'one'}"
            )
        if of.summed and split:
            found.append(f"{name}: split over tensor ranks, and its gradient is summed over them")
    return found


def check(given: Trial, traits: Mapping[str, Traits]) -> str | None:
    """Checks the types of the forward pass, the loss and its divisor; returns an error or None."""
    batch, problem = given.item
    options, context = given.config.objective, given.groups.cp
    try:
        with _typed(given):
            _declare(given, traits)
            made_TC = given.network(problem.input_TC, problem.level_M, batch)
            loss = losses.loss_of(batch, problem, made_TC, options, context=context)
            # Each tensor rank has the loss of all tokens of its context rank.
            spmd.assert_type(loss.total, _axes(given, tensor=I, context=V))
            _check_divisor(given, loss.count)
    except spmd.SpmdTypeError as error:
        return f"{str(error).strip()}\n    {_place(error)}"
    return None


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    *_, last = (
        frame for frame in frames if "/dit/" in frame.filename or frame.filename == __file__
    )
    return f"{last.filename}:{last.lineno}: {last.line}"


def _axes(given: Trial, *, tensor: Any, context: Any) -> dict[str, Any]:
    """The type `tensor` for the mesh axis `tp`, `context` for `cp`; without axes of one rank."""
    both = {"tp": tensor, "cp": context}
    return {axis: one for axis, one in both.items() if getattr(given.groups, axis).size() > 1}


def _declare(given: Trial, traits: Mapping[str, Traits]) -> None:
    """Declares the types of weights, buffers, and tensors of the pack and the training problem.

    Over tensor ranks, a weight has the type in `traits`. Over context ranks it is R, because its
    gradient is summed over data and context ranks at once; a tensor is V if it has a row for each
    token, else R.
    """
    for name, weight in given.network.named_parameters():
        spmd.assert_type(weight, _axes(given, tensor=traits[name].type, context=R))
    for buffer in given.network.buffers():
        spmd.assert_type(buffer, _axes(given, tensor=I, context=R))
    batch, problem = given.item
    of_problem = {one.name: getattr(problem, one.name) for one in fields(problem)}
    for name, tensor in (batch.tensors | of_problem).items():
        if isinstance(tensor, Tensor):
            context = V if name.rpartition("_")[2].startswith("T") else R
            spmd.assert_type(tensor, _axes(given, tensor=I, context=context))


def _check_divisor(given: Trial, count: Tensor) -> None:
    """Checks the type of the divisor of gradients in Megatron-Core: the tokens of all ranks."""
    divided: list[Tensor] = []
    chunk = SimpleNamespace(
        config=given.network.config,
        ddp_config=given.chunk.ddp_config,
        finish_grad_sync=lambda **_: None,
        named_parameters=lambda: iter(()),
        modules=lambda: iter(()),
        scale_gradients=divided.append,
    )
    with spmd.no_typecheck():
        count = count.clone()  # made of a number of this rank, which has no type
    spmd.assert_type(count, _axes(given, tensor=I, context=P))
    with patch.object(dist, "broadcast"):  # over pipeline stages, which are no axis here
        finalize_model_grads([chunk], num_tokens=count, pg_collection=given.groups)  # type: ignore[list-item]
    spmd.assert_type(divided[0], _axes(given, tensor=I, context=R))


@contextmanager
def _typed(given: Trial) -> Iterator[None]:
    """Context in which spmd_types follows each operation and checks its types."""
    axes = {axis: spmd.MeshAxis.of(getattr(given.groups, axis)) for axis in ("tp", "cp")}

    def own_rows(*arguments: Any, **options: Any) -> Any:
        """Calls `text_row`, and types its result as varying: each context rank has its own rows."""
        with spmd.no_typecheck():  # numbers of this process have no type before
            made = text_row(*arguments, **options)
        for tensor in (made.source_L, made.sample_L):
            spmd.assert_type(tensor, _axes(given, tensor=I, context=V))
        return made

    def parts_of_sums(*arguments: Any) -> Tensor:
        """Calls `sample_sums` on a context rank's tokens; types the result as parts of a sum."""
        kinds = _axes(given, tensor=I, context=P)
        return spmd.no_typecheck(out_types=kinds)(sample_sums)(*arguments)

    text_row, sample_sums = joint_transformer.text_row, losses.sample_sums
    with (
        patch.object(joint_transformer, "text_row", own_rows),
        patch.object(losses, "sample_sums", parts_of_sums),
        # It adds 0 times the sum of each weight that no output depends on. Their gradients are
        # zero, whatever ranks do to them.
        patch.object(step_layer.StepLayer, "_tied", lambda _, adaln: adaln),
        # spmd_types takes it for a function that writes to its input.
        patch.object(Tensor, "type_as", lambda this, other: this.to(other.dtype)),
        spmd.set_current_mesh(axes),
        checker.typecheck(local=True),
    ):
        yield


def table(traits: Mapping[str, Traits]) -> str:
    """A table as a string: each combination of traits, and how many weights have it."""
    rows = ["type  split  summed  counted  weights"]
    for of in dict.fromkeys(traits.values()):
        names = [name for name, other in traits.items() if other == of]
        marks = "  ".join(
            f"{'yes' if one else 'no':<6}" for one in (of.split, of.summed, of.counted)
        )
        rows.append(f"{of.type.name:<4}  {marks}  {len(names)}, such as {names[0]}")
    return "\n".join(rows)
