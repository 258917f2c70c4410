"""The network: named sizes, positions, precision, and how it is spread over devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from dit.config.checks import Rule, at_least_one, check, given, numbers, positive


class Precision(StrEnum):
    """Type of the weights in matrix products; levels, positions and loss are always float32."""

    FP32 = "fp32"
    BF16 = "bf16"


class ExtraPosition(StrEnum):
    """Learnable positions added before every layer (Cosmos), or none."""

    NONE = "none"
    LEARNABLE = "learnable"


class Recompute(StrEnum):
    """Which activations the backward pass computes again instead of keeping."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class RecomputeMethod(StrEnum):
    """How full recomputation picks layers: all in groups, or the first few."""

    UNIFORM = "uniform"
    BLOCK = "block"


class Implementation(StrEnum):
    """Library whose linear layers and attention are used."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"


class Fp8(StrEnum):
    """Formats of 8-bit matrix products: e4m3, or e4m3 with gradients in e5m2 (hybrid)."""

    E4M3 = "e4m3"
    HYBRID = "hybrid"


class Fp8Recipe(StrEnum):
    """Numbers that share a scaling factor: a tensor, a block of 128, or 32 (Blackwell)."""

    TENSORWISE = "tensorwise"
    BLOCKWISE = "blockwise"
    MXFP8 = "mxfp8"


class ContextComm(StrEnum):
    """How context ranks exchange tokens: heads (a2a), or keys and values (all_gather; p2p, a ring).

    p2p needs Transformer Engine.
    """

    A2A = "a2a"
    ALL_GATHER = "all_gather"
    P2P = "p2p"


_MOST = {
    "num_layers": 2**14,
    "hidden_size": 2**17,
    "num_attention_heads": 2**14,
    "mlp_ratio": 1024,
    "adaln_lora_dim": 2**17,
    "in_channels": 2**16,
    "patch_spatial": 1024,
    "patch_temporal": 1024,
    "crossattn_emb_size": 2**20,
    "crossattn_proj_size": 2**20,
    "text_pad_to": 2**20,
    "max_size": 2**16,
    "rope_scale": 1e6,
    "base_fps": 1e6,
    "init_method_std": 1e6,
}
"""Upper bounds beyond any network; `check_memory` refuses smaller sizes that fit no device."""

_COSMOS = {
    "adaln_lora_dim": 256,
    "in_channels": 16,
    "crossattn_emb_size": 1024,
    "text_pad_to": 512,
    "rope_scale": (2.0, 1.0, 1.0),
    "extra_pos_embed": ExtraPosition.LEARNABLE,
    "concat_padding_mask": True,
}

MODEL_SIZES: dict[str, dict[str, Any]] = {
    "dit_s": {"num_layers": 12, "hidden_size": 384, "num_attention_heads": 6},
    "dit_b": {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12},
    "dit_l": {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16},
    "dit_xl": {"num_layers": 28, "hidden_size": 1152, "num_attention_heads": 16},
    "cosmos_7b": {"num_layers": 28, "hidden_size": 4096, "num_attention_heads": 32, **_COSMOS},
    "cosmos_14b": {
        "num_layers": 36,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        **_COSMOS,
        "rope_scale": (2.0, 2.0, 2.0),
    },
}
"""What each `model.name` sets.

DiT: arXiv:2212.09748, Table 1. Cosmos 1: TRANSFORMER_CONFIGS of Diffusers'
scripts/convert_cosmos_to_diffusers.py ("Cosmos-1.0-Diffusion-7B-Text2World" and "-14B-"); captions
are filled up to 512 tokens by `max_sequence_length` of its CosmosTextToWorldPipeline.
"""

CUSTOM_SIZE = "custom"
"""The `model.name` that sets nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The DiT: sizes, positions, precision and how it is spread over devices."""

    name: str = "dit_xl"
    """A named size (dit_s, dit_b, dit_l, dit_xl, cosmos_7b, cosmos_14b) or `custom`."""
    num_layers: int = 28
    """Transformer layers."""
    hidden_size: int = 1152
    """Width of a token inside the model; a multiple of num_attention_heads."""
    num_attention_heads: int = 16
    """Heads of self- and cross-attention."""
    mlp_ratio: float = 4.0
    """Width of the MLP over the hidden size."""
    adaln_lora_dim: int = 256
    """Rank of each low-rank adaLN modulation."""
    in_channels: int = 16
    """Channels of the latent, as the shards hold it."""
    patch_spatial: int = 2
    """Rows and columns of the latent in one token."""
    patch_temporal: int = 1
    """Frames of the latent in one token."""
    crossattn_emb_size: int = 1024
    """Width of the text embedding in the shards."""
    crossattn_proj_size: int | None = None
    """Width of a text projection, linear with bias and GELU (Cosmos 2.5); null has none."""
    text_pad_to: int | None = None
    """A number fills captions up to it with zeros that are attended to (Cosmos: 512), null none."""
    rope_scale: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """NTK scale of the rotary frequencies for frames, rows and columns."""
    base_fps: float = 24.0
    """A frame's rotary position is frame * base_fps / fps of the clip."""
    extra_pos_embed: ExtraPosition = ExtraPosition.NONE
    """Learnable positions added before every layer, beside the rotary ones (Cosmos: learnable)."""
    max_size: tuple[int, int, int] = (128, 240, 240)
    """Latent frames, rows, columns covered by learnable positions."""
    concat_padding_mask: bool = False
    """Append Cosmos's padding-mask channel (always zero here) to the latent."""
    precision: Precision = Precision.BF16
    """Type of weights and matrix products; levels, positions and loss are always float32."""
    tensor_model_parallel_size: int = 1
    """Ranks that share every matrix."""
    sequence_parallel: bool = False
    """Tensor ranks also share the tokens between the matrices."""
    context_parallel_size: int = 1
    """Ranks that share the tokens of every sample."""
    cp_comm_type: ContextComm = ContextComm.A2A
    """What context ranks exchange: heads (a2a), or keys and values (all_gather)."""
    pipeline_model_parallel_size: int = 1
    """Stages that share the layers."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Groups of layers on each pipeline stage; null is one."""
    recompute_granularity: Recompute = Recompute.NONE
    """What the backward pass computes again: none, outputs of attention (selective), or full."""
    recompute_method: RecomputeMethod = RecomputeMethod.UNIFORM
    """How full recomputation picks layers: all in groups (uniform), or the first few (block)."""
    recompute_num_layers: int = 1
    """Layers in one recomputed group (uniform), or how many are recomputed (block)."""
    cpu_offloading_num_layers: int = 0
    """First layers of each stage whose activations are kept in host memory until backward."""
    init_method_std: float | None = None
    """Standard deviation of the initial weights; null is 1 / sqrt(inputs) for each matrix."""
    transformer_impl: Implementation = Implementation.LOCAL
    """Linear layers and attention of torch and Megatron-Core (local), or of transformer_engine."""
    fp8: Fp8 | None = None
    """Matrix products in 8 bits, e4m3 or hybrid, by Transformer Engine; null has none."""
    fp8_recipe: Fp8Recipe = Fp8Recipe.TENSORWISE
    """Scaling: tensorwise, blockwise or mxfp8. All use current scaling, so no state is stored."""
    gradient_accumulation_fusion: bool = False
    """Weight gradients accumulated inside the matrix product, by Apex or Transformer Engine."""
    compile: bool = False
    """Fuse norms, modulation and rotary positions with torch.compile."""
    vae_cache_folder: str | None = None
    """Folder of the VAE that decodes pictures; the embedded `pixel` codec needs none."""

    def __post_init__(self) -> None:
        check(*self._sizes())
        check(*self._shapes(), *self._stages())

    def _sizes(self) -> list[Rule]:
        """Rules of single values."""
        whole = ("num_layers", "hidden_size", "num_attention_heads", "adaln_lora_dim")
        whole += ("in_channels", "patch_spatial", "patch_temporal", "crossattn_emb_size")
        whole += ("tensor_model_parallel_size", "context_parallel_size", "recompute_num_layers")
        whole += ("pipeline_model_parallel_size",)
        names = (*MODEL_SIZES, CUSTOM_SIZE)
        return [
            (self.name in names, f"name={self.name} is no known size; use {', '.join(names)}"),
            *at_least_one(self, *whole),
            *at_least_one(self, *given(self, "text_pad_to", "crossattn_proj_size")),
            *at_least_one(self, *given(self, "virtual_pipeline_model_parallel_size")),
            *self._offloading(),
            *self._engine(),
            *positive(self, "mlp_ratio", "base_fps", *given(self, "init_method_std")),
            (min(self.rope_scale) > 0, f"rope_scale={self.rope_scale} must be positive"),
            (min(self.max_size) >= 1, f"max_size={self.max_size} must be at least 1"),
            *numbers(self, **_MOST),
        ]

    def _offloading(self) -> list[Rule]:
        count = self.cpu_offloading_num_layers
        return [
            (
                0 <= count <= max(self.num_layers, 0),
                f"cpu_offloading_num_layers={count} must lie in [0, num_layers={self.num_layers}]",
            ),
            (
                count == 0 or self.recompute_granularity is not Recompute.FULL,
                f"cpu_offloading_num_layers={count} keeps what recompute_granularity=full computes"
                " again; set recompute_granularity to none or selective, or the number to 0",
            ),
        ]

    def _engine(self) -> list[Rule]:
        engine = self.transformer_impl is Implementation.TRANSFORMER_ENGINE
        return [
            (
                not engine or self.precision is Precision.BF16,
                f"transformer_impl={self.transformer_impl} computes in bf16; set precision=bf16",
            ),
            (
                self.fp8 is None or engine,
                f"fp8={self.fp8} is Transformer Engine's; set transformer_impl=transformer_engine",
            ),
        ]

    def _shapes(self) -> list[Rule]:
        """Rules of divisibility; sizes must be at least 1."""
        heads, tp = self.num_attention_heads, self.tensor_model_parallel_size
        width, step = self.hidden_size // heads, 16 * tp
        ffn = self.ffn_hidden_size
        return [
            (
                self.fp8 is None or (self.hidden_size % step == 0 and ffn % step == 0),
                f"fp8={self.fp8} takes matrices whose sides divide by 16 on each tensor rank:"
                f" hidden_size={self.hidden_size} and its MLP of {ffn} must divide by {step}",
            ),
            (ffn >= 1, f"mlp_ratio={self.mlp_ratio} leaves hidden_size={self.hidden_size} no MLP"),
            (
                self.hidden_size % heads == 0,
                f"hidden_size={self.hidden_size} does not divide into"
                f" num_attention_heads={heads}; choose a multiple of {heads}",
            ),
            (
                self.hidden_size % heads > 0 or (width % 2 == 0 and width // 6 >= 2),
                f"hidden_size={self.hidden_size} / num_attention_heads={heads} gives heads of"
                f" width {width}; 3-D rotary positions need an even width of at least 12",
            ),
            (
                heads % tp == 0,
                f"num_attention_heads={heads} does not divide by"
                f" tensor_model_parallel_size={tp}; choose a divisor of {heads}",
            ),
            (
                not self.sequence_parallel or tp > 1,
                "sequence_parallel=true needs tensor_model_parallel_size > 1; set it to false",
            ),
            (
                ffn % tp == 0,
                f"the MLP width {ffn} (hidden_size * mlp_ratio) does not divide by"
                f" tensor_model_parallel_size={tp}",
            ),
        ]

    def _stages(self) -> list[Rule]:
        """Rules of layers and heads over pipeline and context ranks."""
        heads, layers, tp = (
            self.num_attention_heads,
            self.num_layers,
            self.tensor_model_parallel_size,
        )
        cp, pp = self.context_parallel_size, self.pipeline_model_parallel_size
        virtual = self.virtual_stages
        return [
            (
                virtual == 1 or pp > 1,
                f"virtual_pipeline_model_parallel_size={virtual} needs"
                " pipeline_model_parallel_size > 1; set it to null",
            ),
            (
                layers % (pp * virtual) == 0,
                f"num_layers={layers} does not divide by pipeline_model_parallel_size={pp} *"
                f" virtual_pipeline_model_parallel_size={virtual}; choose sizes whose product"
                f" divides {layers}",
            ),
            (
                cp == 1 or self.cp_comm_type is not ContextComm.A2A or heads % (tp * cp) == 0,
                f"cp_comm_type=a2a spreads num_attention_heads={heads} over"
                f" tensor_model_parallel_size={tp} * context_parallel_size={cp} = {tp * cp} ranks,"
                " which does not divide; use cp_comm_type=all_gather",
            ),
        ]

    @property
    def ffn_hidden_size(self) -> int:
        return int(self.hidden_size * self.mlp_ratio)

    @property
    def text_width(self) -> int:
        """Width of the text that the layers attend to."""
        return self.crossattn_proj_size or self.crossattn_emb_size

    @property
    def patch_features(self) -> int:
        """Numbers in one token of the latent: channels * frames * rows * columns."""
        return self.in_channels * self.patch_temporal * self.patch_spatial**2

    @property
    def fp8_rows(self) -> int:
        """For 8-bit products, the number of tokens on a rank must be a multiple of this."""
        return 32 if self.fp8_recipe is Fp8Recipe.MXFP8 else 16

    def on_one_rank(self) -> ModelConfig:
        """The same model without parallelism and without features that another machine may lack."""
        return replace(
            self,
            transformer_impl=Implementation.LOCAL,
            fp8=None,
            gradient_accumulation_fusion=False,
            compile=False,
            cpu_offloading_num_layers=0,
            tensor_model_parallel_size=1,
            sequence_parallel=False,
            context_parallel_size=1,
            pipeline_model_parallel_size=1,
            virtual_pipeline_model_parallel_size=None,
        )

    @property
    def virtual_stages(self) -> int:
        """Groups of layers on each pipeline stage."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def model_parallel_size(self) -> int:
        """Ranks that together hold one replica of the model."""
        return (
            self.tensor_model_parallel_size
            * self.context_parallel_size
            * self.pipeline_model_parallel_size
        )
