"""A family that a test defines: double-stream layers, then single-stream ones, as FLUX has them.

A sample has a text, which may be empty, a pooled text, and, if it likes, a given first frame.
`$DIT_FAMILIES=toy=tests.toy_family:FAMILY` registers it, in spawned processes too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.config import ModelConfig, Precision
from dit.models.family import Family, InputKind, ObjectiveConventions, SampleInput, WeightRules
from dit.models.joint.family import double_layer, single_layer
from dit.models.layer_spec import (
    AttentionSpec,
    FeedForwardSpec,
    NetworkSpec,
    PerBlockModulation,
    StackSpec,
)
from dit.models.layers.modulation import PerBlockAdaLN, sinusoid
from dit.models.layers.parallel_linear import BuildContext, Replicated, transformer_config
from dit.models.layers.queries_and_keys import RotaryTable
from dit.models.positions import GridPositions
from dit.models.stacks.joint_transformer import T_EMB, JointLayout, JointTransformer
from dit.models.stacks.stacked_transformer import Blocks

PLACE = "toy=tests.toy_family:FAMILY"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyConfig(ModelConfig):
    """Double-stream layers, and single-stream ones after them."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {"toy": {}}
    takes_stored_padding: ClassVar[bool] = True
    name: str = "toy"
    family: str = "toy"
    num_layers: int = 2
    hidden_size: int = 48
    num_attention_heads: int = 4
    in_channels: int = 4
    crossattn_emb_size: int = 8
    num_single_layers: int = 3
    """0 has double-stream layers alone: nothing reads the text after the last one."""
    pooled_size: int = 6
    """Width of the pooled text."""

    own_stages = ModelConfig.enough_layers

    @property
    def all_layers(self) -> int:
        return self.num_layers + self.num_single_layers

    @property
    def stacks(self) -> tuple[StackSpec, ...]:
        width, heads = self.hidden_size, self.num_attention_heads
        parts: Any = {
            "attention": AttentionSpec(width=width, heads=heads, bias=True),
            "feed_forward": FeedForwardSpec(width=width, hidden=self.ffn_hidden_size, bias=True),
        }
        stacks = (
            StackSpec(name="double_blocks", count=self.num_layers, layer=double_layer(**parts)),
            StackSpec(name="single", count=self.num_single_layers, layer=single_layer(**parts)),
        )
        return stacks if self.num_single_layers else stacks[:1]


class ToyNetwork(JointTransformer):
    def __init__(
        self, model: ToyConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        config, width = transformer_config(model), model.hidden_size
        super().__init__(config, model, groups, vp_stage, model.stacks)
        axis = width // model.num_attention_heads // 3
        self.rotary = RotaryTable((axis,) * 3, (1e4, 256.0, 1e4), dtype=torch.float64)
        if self.pre_process:
            biased: Any = {"config": config, "bias": True}
            self.patches = Replicated(model.patch_features, width, **biased)
            self.text_in = Replicated(model.crossattn_emb_size, width, **biased)
            self.level = Replicated(width, width, **biased)
            self.pooled = Replicated(model.pooled_size, width, **biased)
        self.build_stacks()
        if self.post_process:
            context = BuildContext(model=model, config=config, groups=groups)
            self.modulate_out = PerBlockAdaLN(
                context, width, PerBlockModulation(), parts=1, gated=False
            )
            self.proj_out = Replicated(width, model.patch_features, config=config, bias=True)

    def embed(
        self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch, layout: JointLayout
    ) -> Blocks:
        dtype, levels = self.config.params_dtype, batch.num_levels // batch.num_samples
        text_LE = self.my_tokens(layout.text.of(batch.text_LE.to(dtype)))
        pooled_MD = self.pooled(batch.vectors["pooled_text"].to(dtype)).repeat(levels, 1)
        wave_MD = sinusoid(level_M, self.config.hidden_size).to(dtype)
        return {
            "hidden": self.patches(self.my_tokens(x_TC.to(dtype))),
            "text_hidden": self.text_in(text_LE),
            T_EMB: nn.functional.silu(self.level(wave_MD)) + pooled_MD,
        }


FAMILY = Family(
    name="toy",
    config=ToyConfig,
    network=lambda: ToyNetwork,
    spec=lambda model: NetworkSpec(stacks=model.stacks),
    parts={"text": "text", "attention": "attention", "mlp": "mlp", "proj_out": "head"},
    inputs=lambda model: (
        SampleInput(
            name="text", kind=InputKind.TEXT, width=model.crossattn_emb_size, may_be_empty=True
        ),
        SampleInput(name="pooled_text", kind=InputKind.VECTOR, width=model.pooled_size),
        SampleInput(name="first_frame_latent", kind=InputKind.FRAMES, width=4, required=False),
    ),
    positions=lambda _: GridPositions(),
    weights=WeightRules(zero=("*proj_out.weight",)),
    objective=ObjectiveConventions(settings={"name": "flow"}),
    vae=lambda _: "pixel",
    tiny={"toy": {"precision": Precision.FP32}},
)
