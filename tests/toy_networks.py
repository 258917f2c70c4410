"""Small networks of other families and of their layers, built of the parts of `dit.models`.

joint    the toy family: double-stream layers, then single-stream ones
double   its double-stream layers alone: nothing reads the text after the last one
cross    cross-attention in the manner of Wan: norm across heads, table modulation in float32,
         cross-attention without gate, biases
wan...   the family `wan`: with pictures for first and last frame, and with a clean first frame
flux     the family `flux`, with reference pictures and guidance
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from dit.batch import Grid, PackedBatch
from dit.config import FlowConfig, ModelConfig, Precision, Recompute, RecomputeMethod
from dit.models.attention.spans import Spans
from dit.models.flux.model import FluxNetwork
from dit.models.layer_spec import (
    TOKENS,
    Activation,
    Attend,
    AttendTo,
    AttentionSpec,
    Feed,
    FeedForwardSpec,
    KeyRows,
    LayerSpec,
    Modulation,
    NormKind,
    Port,
    QkNorm,
    RowNorm,
    StackSpec,
    TableModulation,
)
from dit.models.layers.modulation import TableAdaLN, TimestepConditioning, TimestepEmbedding
from dit.models.layers.packed_attention import AttendedRows, RowConditions
from dit.models.layers.parallel_linear import Replicated, transformer_config
from dit.models.layers.per_sample import PerSample
from dit.models.layers.queries_and_keys import RotaryTable
from dit.models.registry import family_of
from dit.models.stacks.parts import LayerConditions
from dit.models.stacks.stacked_transformer import Blocks, Shapes, StackedTransformer
from dit.models.wan.model import WanNetwork
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.training_target import with_clean_level
from tests.families.flux import flux_model
from tests.families.wan import wan_model
from tests.packs import random_pack, tiny_model
from tests.toy_family import FAMILY, ToyConfig, ToyNetwork

RECOMPUTED: list[dict[str, Any]] = [
    {"recompute_granularity": Recompute.FULL},
    {"recompute_granularity": Recompute.FULL, "recompute_num_layers": 2},
    {
        "recompute_granularity": Recompute.FULL,
        "recompute_method": RecomputeMethod.BLOCK,
        "recompute_num_layers": 3,
    },
    {"recompute_granularity": Recompute.SELECTIVE},
]
"""Fields of a network: all layers, groups, some layers, and attention computed again."""


def toy_parts(model: ModelConfig, **attention: Any) -> dict[str, Any]:
    """Attention and feed-forward with biases; the feed-forward is three heads' widths wide."""
    width, heads = model.hidden_size, model.num_attention_heads
    return {
        "attention": AttentionSpec(width=width, heads=heads, bias=True, **attention),
        "feed_forward": FeedForwardSpec(
            width=width, hidden=3 * width, activation=Activation.GELU_TANH, bias=True
        ),
    }


def rotary(model: ModelConfig) -> RotaryTable:
    width = model.hidden_size // model.num_attention_heads
    rest = width - 2 * (width // 6 * 2)
    widths = (rest, (width - rest) // 2, (width - rest) // 2)
    return RotaryTable(widths, (1e4, 256.0, 1e4), dtype=torch.float64)


class ToyCross(StackedTransformer):
    def __init__(
        self, model: ModelConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        config = transformer_config(model)
        parts = toy_parts(model, norm=QkNorm.ACROSS_HEADS)
        attention, modulation = parts["attention"], Modulation("modulation", TableModulation())
        text = Port(TOKENS, "cross_attention", norm=RowNorm("norm_cross", NormKind.LAYER))
        steps = (
            Attend(Port(TOKENS, "self_attention", modulation[0]), attention),
            AttendTo(text, attention, (KeyRows(model.crossattn_emb_size),)),
            Feed(Port(TOKENS, "mlp", modulation[1]), parts["feed_forward"]),
        )
        stack = StackSpec(name="blocks", count=model.num_layers, layer=LayerSpec(steps))
        super().__init__(config, model, groups, vp_stage, [stack])
        width = model.hidden_size
        self.rotary = rotary(model)
        if self.pre_process:
            self.patches = Replicated(model.patch_features, width, config=config, bias=True)
            self.level = TimestepEmbedding(config)
            self.time_6 = Replicated(width, 6 * width, config=config, bias=True)
        self.build_stacks()
        if self.post_process:
            self.modulate_out = TableAdaLN(config, width, parts=1, gated=False)
            self.proj_out = Replicated(width, model.patch_features, config=config, bias=True)

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        samples, width = batch.num_samples, self.config.hidden_size
        return {"t_emb": (samples, width), "shared": (samples, 6 * width)}

    def layout(self, batch: PackedBatch) -> PerSample:
        return self.per_sample(self.my_tokens(batch.segment_T))

    def embed(self, x_TC: Tensor, level_N: Tensor, batch: PackedBatch, layout: PerSample) -> Blocks:
        t_emb, offset = self.level(level_N)
        t_emb = t_emb + offset[:, : self.config.hidden_size]
        hidden = self.patches(self.my_tokens(x_TC.to(self.config.params_dtype)))
        return {"hidden": hidden, "t_emb": t_emb, "shared": self.time_6(nn.functional.silu(t_emb))}

    def conditions(self, blocks: Blocks, batch: PackedBatch, layout: PerSample) -> Any:
        cos, sin = self.rotary(batch.position_TA)
        rows, device = len(batch.segment_T), batch.segment_T.device
        captions = [(a, b - a) for a, b in pairwise(batch.text_starts)]
        text = AttendedRows(
            rows_LE=batch.text_LE.to(self.config.params_dtype),
            spans=Spans.of(batch.shared_spans, captions, total=rows, device=device),
        )
        return LayerConditions(
            timestep=TimestepConditioning(
                t_emb_ND=blocks["t_emb"], adaln_shift_NX=blocks["shared"]
            ),
            rows={TOKENS: RowConditions(per_sample=layout, angles_TK=(cos, sin))},
            meetings={(TOKENS,): self.context.exchange(batch, rows=rows)},
            keys={"text": text},
        )

    def head(self, blocks: Blocks, batch: PackedBatch, layout: PerSample) -> Tensor:
        twice = blocks["t_emb"].repeat(1, 2)
        timestep = TimestepConditioning(t_emb_ND=blocks["t_emb"], adaln_shift_NX=twice)
        (adaln,) = self.modulate_out(timestep)
        return self.all_tokens(self.proj_out(adaln.modulate(blocks["hidden"], layout)))


WANS = {"wan_flf2v": "flf2v", "wan_ti2v": "ti2v"}
NETWORKS = {"joint": ToyNetwork, "double": ToyNetwork, "cross": ToyCross}
NETWORKS |= {**dict.fromkeys(WANS, WanNetwork), "flux": FluxNetwork}


def toy_model(name: str, **changes: Any) -> ModelConfig:
    """The configuration of one of `NETWORKS`."""
    if name == "cross":
        return tiny_model(**{"num_layers": 4, **changes})
    if name == "flux":
        return flux_model(reference_latents=2, **changes)
    if name in WANS:
        return wan_model(WANS[name], **changes)
    sizes = {"num_layers": 2, "num_single_layers": 3 if name == "joint" else 0}
    return ToyConfig(**{**sizes, "hidden_size": 96, "precision": Precision.FP32, **changes})


def toy_pack(
    model: ModelConfig, grids: list[Grid], texts: list[int], *, multiple: int = 8
) -> PackedBatch:
    """A pack for it, of samples with these grids and text lengths; videos have a first frame."""
    family = FAMILY if isinstance(model, ToyConfig) else None
    told = family_of(model).guidance(model) if family is None else None
    return random_pack(grids, texts, model=model, multiple=multiple, family=family, guidance=told)


def level_rows(level_N: Tensor, batch: PackedBatch) -> Tensor:
    """Rows of the clean level after those of the samples, where the pack has such tokens."""
    return with_clean_level(level_N, batch, FlowMatching(FlowConfig()))
