"""Types of networks, as they are and broken, and what is refused of each, as one line of JSON.

In a process of its own, because spmd_types changes functions of torch and the group is a fake one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from megatron.core.tensor_parallel import layers

from dit.models.layers.adaptable import TensorSharing
from dit.models.layers.parallel_linear import ColumnLinear
from dit.train import loss
from tools.typed_passes import Trial, check, disagreements, trial, weight_traits

SIZES = ("dit_s", "wan2.1_i2v_14b", "flux1_kontext", "lumina2", "qwen_image_edit_2511")
"""Kinds of layers: cross-attention with norms of heads and across heads, double-stream and
single-stream, refiners, a row of text that the last layer does not read."""
LAYOUTS = ("tp2", "tp2+sp", "cp2+ag", "tp2+sp+cp2", "tp2+dpo+lora+cp2")

Break = Callable[[Trial], AbstractContextManager[Any]]


def without_copy(given: Trial) -> AbstractContextManager[Any]:
    for module in given.network.modules():
        if isinstance(module, ColumnLinear):
            module.allreduce_dgrad, module.disable_grad_reduce = False, True
    return nullcontext()


def without_reduction(_: Trial) -> AbstractContextManager[Any]:
    name = "reduce_from_tensor_model_parallel_region"
    return patch.object(layers, name, lambda rows, **_: rows)


def without_sum_of_norms(given: Trial) -> AbstractContextManager[Any]:
    return patch.object(given.network.config, "qk_layernorm", False)


def _unmark(given: Trial, mark: str, *, value: bool = False) -> AbstractContextManager[Any]:
    marked = [one for one in given.network.parameters() if getattr(one, mark, False) is not value]
    setattr(marked[0], mark, value)
    return nullcontext()


def without_mark_of_tokens(given: Trial) -> AbstractContextManager[Any]:
    return _unmark(given, "sequence_parallel")


def without_mark_of_split(given: Trial) -> AbstractContextManager[Any]:
    return _unmark(given, "tensor_model_parallel")


def with_mark_of_split(given: Trial) -> AbstractContextManager[Any]:
    return _unmark(given, "tensor_model_parallel", value=True)


def adapter_without_exchange(_: Trial) -> AbstractContextManager[Any]:
    return patch.object(TensorSharing, "exchanged", lambda _, rows: rows)


def output_with_gradients_summed(_: Trial) -> AbstractContextManager[Any]:
    from dit.models.stacks import stacked_transformer as module

    gather = module.gather_from_sequence_parallel_region

    def summed(rows: Any, *, group: Any, **_: Any) -> Any:
        return gather(rows, group=group)

    return patch.object(module, "gather_from_sequence_parallel_region", summed)


def errors_of_pairs_without_sum(_: Trial) -> AbstractContextManager[Any]:
    return patch.object(loss, "_over_context", lambda sums_N, *_: sums_N)


@contextmanager
def tokens_without_sum(given: Trial) -> Iterator[None]:
    everything = dist.all_reduce

    def all_reduce(tensor: Any, *arguments: Any, group: Any = None, **options: Any) -> Any:
        if group is not given.groups.dp_cp:
            return everything(tensor, *arguments, group=group, **options)

    with patch.object(dist, "all_reduce", all_reduce):
        yield


BREAKS: dict[str, tuple[str, str, Break]] = {
    "dropped copy": ("dit_s", "tp2", without_copy),
    "dropped reduction": ("dit_s", "tp2", without_reduction),
    "norm of heads without its sum": ("dit_s", "tp2", without_sum_of_norms),
    "mark of a part of the tokens removed": ("flux1_kontext", "tp2+sp", without_mark_of_tokens),
    "mark of a split weight removed": ("flux1_kontext", "tp2", without_mark_of_split),
    "mark of a split weight on a whole one": ("flux1_kontext", "tp2+sp", with_mark_of_split),
    "adapter without its exchange": ("flux1_kontext", "tp2+lora", adapter_without_exchange),
    "gradient of the output summed": ("dit_s", "tp2+sp", output_with_gradients_summed),
    "errors of pairs not summed": ("dit_s", "cp2+dpo+lora", errors_of_pairs_without_sum),
    "count of tokens not summed": ("dit_s", "cp2", tokens_without_sum),
}
"""What is broken -> a network and a layout that show it."""


def found(size: str, layout: str, broken: Break = lambda _: nullcontext()) -> str:
    given = trial(size, layout)
    with broken(given):
        traits = weight_traits(given)
        return "\n".join([*disagreements(given, traits), *filter(None, [check(given, traits)])])


def main() -> None:
    whole = {f"{size} {name}": found(size, name) for size in SIZES for name in LAYOUTS}
    broken = {name: found(*case) for name, case in BREAKS.items()}
    sys.stdout.write(f"{json.dumps({'whole': whole, 'broken': broken})}\n")


if __name__ == "__main__":
    sys.exit(main())
