"""Settings that the networks of all families share: sizes, precision, and parallelism.

Each family adds fields, named sizes and rules in its subclass of `ModelConfig`, in
`dit/models/<family>/family.py`. `model.family` selects it before other keys are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, Self

from dit.config.checks import Rule, at_least_one, bounds, check, not_negative, numbers, positive
from dit.config.choices import (
    AttentionBackend,
    ContextComm,
    Fp8,
    Fp8Recipe,
    Implementation,
    InitMethod,
    Precision,
    Recompute,
    RecomputeMethod,
    TextPadding,
)
from dit.config.resume import AtStart, Live, Refused
from dit.config.sparsity import TokenRoute, route_rules
from dit.local_path import LocalPath

_MOST = {
    "num_layers": 2**14,
    "hidden_size": 2**17,
    "num_attention_heads": 2**14,
    "mlp_ratio": 1024,
    "in_channels": 2**16,
    "patch_spatial": 1024,
    "patch_temporal": 1024,
    "crossattn_emb_size": 2**20,
    "text_pad_to": 2**20,
    "init_method_std": 1e6,
}
"""Upper bounds, beyond any network's sizes; `check_memory` refuses smaller sizes that fit no
device."""

CUSTOM_SIZE = "custom"
"""`model.name` of a network whose sizes are all set by keys."""
OTHER_NETWORKS = "docs/families.md lists networks that cannot be trained yet, and what they need"
"""Last sentence of errors about unknown networks."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network: sizes, positions, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The named sizes of the family: name -> the keys that it sets, with their values."""
    takes_stored_padding: ClassVar[bool] = False
    """Whether `text_pad_to` may be `stored`, because published weights attend to the encoder's
    padding."""
    shown_before: ClassVar[Mapping[str, str]] = {}
    """Order of keys in written files: field of the family -> shared field that it precedes."""
    attended_multiple: ClassVar[int] = 1
    """Latents and text of a sample are each padded with learned tokens, inside attention, to a
    multiple of this number of tokens (Z-Image); 1: no padding."""
    attends_to_padding: ClassVar[bool] = False
    """Whether tokens of a sample attend to some padding of its latent."""

    name: Live[str]
    """Name of a size of the family, or `custom`."""
    family: Refused[str]
    """Model family, which determines the other keys of `model`; a named size implies it."""
    num_layers: Refused[int]
    """Transformer layers."""
    hidden_size: Refused[int]
    """Width of a token inside the model; a multiple of num_attention_heads."""
    num_attention_heads: Refused[int]
    """Heads of self- and cross-attention."""
    mlp_ratio: Refused[float] = 4.0
    """Width of the MLP divided by the hidden size."""
    in_channels: Refused[int] = 16
    """Channels of the latent, as the shards hold it."""
    patch_spatial: Refused[int] = 2
    """Rows and columns of latent cells in one token."""
    patch_temporal: Refused[int] = 1
    """Latent frames in one token."""
    crossattn_emb_size: Refused[int] = 1024
    """Width of the text embedding in the shards."""
    text_pad_to: Refused[int | TextPadding | None] = None
    """Padding of captions: none (null), zeros up to a length (a number), or as stored (stored)."""
    precision: Live[Precision] = Precision.BF16
    """Dtype of weights and matrix products; levels, positions and loss are always float32."""
    tensor_model_parallel_size: Live[int] = 1
    """Ranks over which every matrix is split."""
    sequence_parallel: Live[bool] = False
    """Also split the activations between tensor-parallel linears over the tensor ranks, by
    tokens."""
    context_parallel_size: Live[int] = 1
    """Ranks over which the tokens of a pack are split."""
    cp_comm_type: Live[ContextComm] = ContextComm.A2A
    """What context-parallel ranks exchange: attention heads (a2a), or keys and values, to all ranks
    at once (all_gather) or around a ring (p2p)."""
    pipeline_model_parallel_size: Live[int] = 1
    """Pipeline stages over which the layers are split."""
    virtual_pipeline_model_parallel_size: Live[int | None] = None
    """Groups of layers on each pipeline stage; null: one group."""
    recompute_granularity: Live[Recompute] = Recompute.NONE
    """Activation recomputation: none, attention (selective), full, or as needed (auto)."""
    recompute_method: Live[RecomputeMethod] = RecomputeMethod.UNIFORM
    """How full recomputation picks layers: all in groups (uniform), or the first few (block)."""
    recompute_num_layers: Live[int] = 1
    """Layers in one recomputed group (uniform), or how many are recomputed (block)."""
    cpu_offloading_num_layers: Live[int] = 0
    """First layers of each stage whose saved activations (inputs, if recomputed) are offloaded to
    the host."""
    blocks_to_swap: Live[int] = 0
    """Blocks of each stage whose frozen matrices are in host memory and copied to the GPU when
    needed."""
    init_method: AtStart[InitMethod] = InitMethod.NORMAL
    """Initial matrices: normal, or xavier, uniform in ±sqrt(6 / (inputs + outputs))."""
    init_method_std: AtStart[float | None] = None
    """Standard deviation of normal initial matrices; with xavier, of the layers that embed noise
    level and pooled text. null: 1 / sqrt(inputs) for each."""
    transformer_impl: Live[Implementation] = Implementation.LOCAL
    """Library of linear layers: torch and Megatron-Core (local), or transformer_engine."""
    attention_backend: Live[AttentionBackend] = AttentionBackend.AUTO
    """Attention kernel; auto times the installed ones, and the checkpoint keeps its choice."""
    fp8: Live[Fp8 | None] = None
    """FP8 matrix products, e4m3 or hybrid, by Transformer Engine; null: none."""
    fp8_recipe: Live[Fp8Recipe] = Fp8Recipe.TENSORWISE
    """Scaling: tensorwise, blockwise or mxfp8. All use current scaling, so no state is stored."""
    gradient_accumulation_fusion: Live[bool] = False
    """Add weight gradients inside the matrix product, by Transformer Engine's layers or Apex."""
    compile: Live[bool] = False
    """Fuse norms, modulation and rotary positions with torch.compile."""
    fused_kernels: Live[bool] = True
    """Fuse norms, modulation and rotary positions by Triton kernels; needs CUDA, Triton and
    compile=false."""
    route_from: Live[int | None] = None
    """First layer, from 0, of those that some tokens skip in training (token routing); null:
    none."""
    route_to: Live[int | None] = None
    """Last layer that these tokens skip; layers of all stacks are counted in sequence."""
    route_rate: Live[float] = 0.5
    """Fraction of the tokens that skip these layers, the same in each run of neighbouring
    tokens."""
    vae_cache_folder: Live[LocalPath | None] = None
    """Folder of the VAE that decodes samples to pictures; the built-in `pixel` codec needs none."""

    @classmethod
    def field_order(cls) -> list[str]:
        """Names of fields in the order of files; by default a family's own precede `precision`."""
        shared = [one.name for one in fields(ModelConfig)]
        order = list(shared)
        for name in (one.name for one in fields(cls) if one.name not in shared):
            order.insert(order.index(cls.shown_before.get(name, "precision")), name)
        return order

    def __post_init__(self) -> None:
        check(*self._sizes())
        check(*self._shapes(), *self.own_shapes(), *self._stages())

    def _sizes(self) -> list[Rule]:
        """Rules about single fields."""
        whole = ("num_layers", "hidden_size", "num_attention_heads")
        whole += ("in_channels", "patch_spatial", "patch_temporal", "crossattn_emb_size")
        whole += ("tensor_model_parallel_size", "context_parallel_size", "recompute_num_layers")
        whole += ("pipeline_model_parallel_size",)
        names, own = (*self.sizes, CUSTOM_SIZE), bounds(type(self))
        at_least = {n: [name for name, b in own.items() if b["least"] == n] for n in (0, 1)}
        most = {name: bound["most"] for name, bound in own.items()}
        return [
            (
                self.name in names,
                f"name={self.name} is not a known size; use {', '.join(names)}. {OTHER_NETWORKS}",
            ),
            self._own_family(),
            *at_least_one(self, *whole),
            *self._text_padding(),
            *at_least_one(self, "virtual_pipeline_model_parallel_size"),
            *self._offloading(),
            *route_rules(self.route_from, self.route_to, self.route_rate, layers=self.all_layers),
            *self._engine(),
            *positive(self, "mlp_ratio", "init_method_std"),
            *at_least_one(self, *at_least[1]),
            *not_negative(self, *at_least[0]),
            *self.own_sizes(),
            *numbers(self, **_MOST | most),
        ]

    def _text_padding(self) -> list[Rule]:
        if self.text_zeros_to is not None:
            return at_least_one(self, "text_pad_to")
        return [
            (
                self.text_pad_to is None or self.takes_stored_padding,
                f"text_pad_to={self.text_pad_to} is for families whose published weights attend to"
                f" the padding of their text encoder, and those of {self.family} do not; set it to"
                " a number or to null",
            )
        ]

    def _own_family(self) -> Rule:
        """The rule that `family` is this class's family, which is the default of the field."""
        (own,) = [one.default for one in fields(self) if one.name == "family"]
        return (
            own in (MISSING, self.family),
            f"family={self.family} does not fit {type(self).__name__}, the configuration of family"
            f" {own}; set family={own}",
        )

    def own_sizes(self) -> list[Rule]:
        """Rules of the family about single fields, in addition to the shared ones."""
        return []

    def own_shapes(self) -> list[Rule]:
        """Rules of the family about divisibility; checked once all sizes are at least 1."""
        return []

    def own_stages(self) -> Rule:
        """Rule of the family about how layers fill the pipeline stages; by default, evenly."""
        pp, virtual = self.pipeline_model_parallel_size, self.virtual_stages
        return (
            self.num_layers % (pp * virtual) == 0,
            f"num_layers={self.num_layers} does not divide by pipeline_model_parallel_size={pp} *"
            f" virtual_pipeline_model_parallel_size={virtual}; choose sizes whose product"
            f" divides {self.num_layers}",
        )

    def enough_layers(self) -> Rule:
        """The rule that each pipeline stage has a layer, for families with several layer stacks."""
        pp, virtual = self.pipeline_model_parallel_size, self.virtual_stages
        return (
            self.all_layers >= pp * virtual,
            f"{self.all_layers} layers do not fill pipeline_model_parallel_size={pp} *"
            f" virtual_pipeline_model_parallel_size={virtual} stages; choose smaller sizes",
        )

    def _offloading(self) -> list[Rule]:
        count, swapped = self.cpu_offloading_num_layers, self.blocks_to_swap
        stages = max(self.pipeline_model_parallel_size * self.virtual_stages, 1)
        most = max(-(-self.all_layers // stages) - 1, 0)
        return [
            (
                0 <= count <= max(self.all_layers, 0),
                f"cpu_offloading_num_layers={count} must lie in [0, {self.all_layers}], the number"
                " of layers",
            ),
            (
                0 <= swapped <= most,
                f"blocks_to_swap={swapped} must lie in [0, {most}], because the device holds at"
                " least one block of each stage",
            ),
        ]

    def _engine(self) -> list[Rule]:
        engine = self.transformer_impl is Implementation.TRANSFORMER_ENGINE
        in_float32 = (AttentionBackend.AUTO, AttentionBackend.SDPA)
        return [
            (
                self.attention_backend in in_float32 or self.precision is Precision.BF16,
                f"attention_backend={self.attention_backend} computes in bf16; set precision=bf16,"
                " or attention_backend=auto",
            ),
            (
                not engine or self.precision is Precision.BF16,
                f"transformer_impl={self.transformer_impl} computes in bf16; set precision=bf16",
            ),
            (
                self.fp8 is None or engine,
                f"fp8={self.fp8} needs Transformer Engine; set transformer_impl=transformer_engine",
            ),
        ]

    def _shapes(self) -> list[Rule]:
        """Rules of divisibility; sizes must be at least 1."""
        heads, tp = self.num_attention_heads, self.tensor_model_parallel_size
        step = 16 * tp
        ffn = self.ffn_hidden_size
        return [
            (
                self.fp8 is None or (self.hidden_size % step == 0 and ffn % step == 0),
                f"fp8={self.fp8} takes matrices whose sides divide by 16 on each tensor rank:"
                f" hidden_size={self.hidden_size} and its MLP of {ffn} must divide by {step};"
                " change them, or set fp8=null",
            ),
            (
                ffn >= 1,
                f"mlp_ratio={self.mlp_ratio} leaves hidden_size={self.hidden_size} no MLP; raise"
                " mlp_ratio (4 is usual)",
            ),
            (
                self.hidden_size % heads == 0,
                f"hidden_size={self.hidden_size} does not divide into"
                f" num_attention_heads={heads}; choose a multiple of {heads}",
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
                f" tensor_model_parallel_size={tp}; choose a divisor of {ffn}",
            ),
        ]

    def _stages(self) -> list[Rule]:
        """Rules for splitting layers over pipeline stages, and heads over context ranks."""
        heads, tp = self.num_attention_heads, self.tensor_model_parallel_size
        cp, pp = self.context_parallel_size, self.pipeline_model_parallel_size
        virtual = self.virtual_stages
        return [
            (
                virtual == 1 or pp > 1,
                f"virtual_pipeline_model_parallel_size={virtual} needs"
                " pipeline_model_parallel_size > 1; set it to null",
            ),
            self.own_stages(),
            (
                cp == 1 or self.cp_comm_type is not ContextComm.A2A or heads % (tp * cp) == 0,
                f"cp_comm_type=a2a spreads num_attention_heads={heads} over"
                f" tensor_model_parallel_size={tp} * context_parallel_size={cp} = {tp * cp} ranks,"
                " which does not divide; use cp_comm_type=all_gather",
            ),
        ]

    @property
    def all_layers(self) -> int:
        """Number of layers of all stacks."""
        return self.num_layers

    @property
    def ffn_hidden_size(self) -> int:
        return int(self.hidden_size * self.mlp_ratio)

    @property
    def patch_volume(self) -> int:
        """Latent cells in one token: frames * rows * columns."""
        return self.patch_temporal * self.patch_spatial**2

    @property
    def patch_features(self) -> int:
        """Numbers in one token of the latent: channels * frames * rows * columns."""
        return self.in_channels * self.patch_volume

    @property
    def text_multiple(self) -> int:
        """The text of each sample in a pack is padded to a multiple of this number of tokens."""
        return self.attended_multiple

    @property
    def side_cells(self) -> int:
        """Rows and columns of a picture must be multiples of this number of latent cells."""
        return self.patch_spatial

    def attended(self, grid: tuple[int, int, int], tokens: int) -> int:  # noqa: ARG002
        """Number of latent tokens in attention, with padding, of a sample with `tokens` tokens.

        `grid` is the size of its target in patches (frames, rows, columns), which some families
        need.
        """
        return -(-tokens // self.attended_multiple) * self.attended_multiple

    def tokens_of(self, frames: int, height: int, width: int) -> int:
        """Number of tokens in attention, with padding, of a sample with a latent of this size.

        `frames`, `height` and `width` are in latent cells.
        """
        p = self.patch_spatial
        grid = (frames // self.patch_temporal, height // p, width // p)
        return self.attended(grid, grid[0] * grid[1] * grid[2])

    def attended_in(self, batch: Any) -> list[int]:
        """Number of tokens in attention, with padding, of each sample of the pack `batch`."""
        pairs = zip(batch.grids, batch.num_tokens, strict=True)
        return [self.attended(grid, tokens) for grid, tokens in pairs]

    def text_in(self, batch: Any) -> Sequence[int]:
        """Number of text tokens of each sample of the pack `batch`, without padding."""
        return batch.text_rows

    @property
    def output_features(self) -> int:
        """Numbers that the network predicts for each token; at most `patch_features`."""
        return self.patch_features

    @property
    def largest_latent(self) -> tuple[int, int, int] | None:
        """The largest latent that the network accepts: (frames, rows, columns), or None for any.

        The numbers are in latent cells.
        """
        return None

    @property
    def text_zeros_to(self) -> int | None:
        """Number of tokens to which captions are padded with zeros; None: no padding."""
        return self.text_pad_to if isinstance(self.text_pad_to, int) else None

    @property
    def cost_sizes(self) -> list[int]:
        """Numbers that determine the cost of a pack: layers, widths, padded length of texts.

        The length is 0 without padding. Families may append numbers of their own. Loader states
        store the list, to notice a change on resume.
        """
        sizes = [self.num_layers, self.hidden_size, self.ffn_hidden_size]
        return [*sizes, self.text_zeros_to or 0]

    @property
    def token_route(self) -> TokenRoute | None:
        """The layers that some tokens skip in training; None: no token routing."""
        if self.route_from is None or self.route_to is None:
            return None
        return TokenRoute.of_rate(self.route_rate, first=self.route_from, last=self.route_to)

    @property
    def fp8_rows(self) -> int:
        """Each rank must have a multiple of this number of tokens for FP8 products."""
        return 32 if self.fp8_recipe is Fp8Recipe.MXFP8 else 16

    @property
    def token_multiple(self) -> int:
        """The tokens of each context rank are padded to a multiple of this number.

        With sequence parallelism each tensor rank gets an equal part of them. FP8 products need
        parts that are multiples of `fp8_rows`, also of the tokens that remain inside a route.
        """
        parts = self.tensor_model_parallel_size if self.sequence_parallel else 1
        run = 1 if self.token_route is None else self.token_route.run
        return parts * run * (1 if self.fp8 is None else self.fp8_rows)

    @property
    def whole_samples_by(self) -> str | None:
        """Key whose value makes layers need all tokens of a sample at once; None: no key does."""
        return None

    @property
    def unguided_by(self) -> str | None:
        """Key whose value rules out classifier-free guidance; None: no key does."""
        return None

    def at_step(self, step: int) -> Self:  # noqa: ARG002
        """The configuration that training uses at `step`; some families change it with the step."""
        return self

    def with_all_tokens(self) -> Self:
        """This configuration without token routing."""
        return replace(self, route_from=None, route_to=None)

    def on_one_rank(self) -> Self:
        """This configuration for one rank, with all tokens and without optional libraries.

        It has no parallelism, token routing, FP8, compilation or offloading, and chooses the
        attention kernel itself.
        """
        return replace(
            self,
            transformer_impl=Implementation.LOCAL,
            attention_backend=AttentionBackend.AUTO,
            fp8=None,
            gradient_accumulation_fusion=False,
            compile=False,
            cpu_offloading_num_layers=0,
            blocks_to_swap=0,
            tensor_model_parallel_size=1,
            sequence_parallel=False,
            context_parallel_size=1,
            pipeline_model_parallel_size=1,
            virtual_pipeline_model_parallel_size=None,
            route_from=None,
            route_to=None,
        )

    @property
    def virtual_stages(self) -> int:
        """Groups of layers on each pipeline stage."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that together hold one replica of the model."""
        return (
            self.tensor_model_parallel_size
            * self.context_parallel_size
            * self.pipeline_model_parallel_size
        )
