"""LTX-2 in Diffusers, `LTX2VideoTransformer3DModel`: tensor names, config.json, files, calls."""

# of the video, of the sound: D, A widths; F, G hidden widths of MLPs; E, S widths of captions;
# C, B numbers in a token
# H heads, W width of the sinusoidal timestep embedding, R rows of a table

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from dit.config.checks import Rule
from dit.models.diffusers.arrangements import ByHead, ByOwnHead
from dit.models.diffusers.form import (
    Companion,
    ConfigKeys,
    DiffusersForm,
    Key,
    OwnKey,
    Pipeline,
    SingleFile,
    heads_of,
    own_names,
    same,
)
from dit.models.diffusers.names import NameTable, Row, TensorSplit, linear_rows
from dit.models.family import REFERENCE
from dit.models.joint.diffusers import mlp_misfit, outputs_as_inputs
from dit.models.layer_spec import LEVEL_WAVES
from dit.models.ltx2.family import (
    FIRST_FRAME,
    MOST_CONNECTOR_LAYERS,
    SOUND,
    SOUND_RATE,
    SOUND_TEXT,
    CrossLevels,
    Ltx2Config,
    TextConnectors,
    TextModulation,
)

if TYPE_CHECKING:
    from torch import Tensor

    from dit.batch import Grid, LatentSample

CLASS = "LTX2VideoTransformer3DModel"
_LAYER, _BLOCK = "blocks.layers.*", "transformer_blocks.*"
_REPLICATED, _COLUMN, _ROW = TensorSplit.REPLICATED, TensorSplit.COLUMN, TensorSplit.ROW


def _gates(model: Any) -> bool:
    return model.head_gates


def _told(model: Any) -> bool:
    return model.text_modulation is TextModulation.TOLD


def _modulated(model: Any) -> bool:
    return model.text_modulation is not TextModulation.NONE


def _projects(model: Any) -> bool:
    return model.text_projections


def _attention_rows(ours: str, theirs: str, widths: tuple[str, str, str]) -> tuple[Row, ...]:
    """Lines of the name table for an attention of the layers and its norms.

    `widths` are letters for the width of the queries' tokens, the width of the keys' tokens, and
    the width of all heads together.
    """
    width, keys, inner = widths
    ours, theirs = f"{_LAYER}.{ours}", f"{_BLOCK}.{theirs}"
    joined = ByHead() if inner == "D" else ByOwnHead()
    column: Any = {"split": _COLUMN}
    names = [f"{theirs}.to_{letter}" for letter in "qkv"]
    if "self" in ours:
        many = (tuple(names), f"3{inner}", width)
        linears = linear_rows(f"{ours}.linear_qkv", *many, **column, arrangement=joined)
    else:
        both = (tuple(names[1:]), f"2{inner}", keys)
        linears = (
            *linear_rows(f"{ours}.linear_q", names[0], inner, width, **column),
            *linear_rows(f"{ours}.linear_kv", *both, **column, arrangement=joined),
        )
    norms = (
        Row(f"{ours}.across_heads.{a}_scale", (f"{theirs}.norm_{b}.weight",), _COLUMN, (inner,))
        for a, b in (("query", "q"), ("key", "k"))
    )
    gate = (f"{theirs}.to_gate_logits", "H", width)
    return (
        *linears,
        *norms,
        *linear_rows(f"{ours}.linear_proj", f"{theirs}.to_out.0", width, inner, split=_ROW),
        *linear_rows(f"{ours}.linear_heads", *gate, **column, exists=_gates),
    )


def _level_rows(ours: str, theirs: str, width: str, count: str, **exists: Any) -> tuple[Row, ...]:
    """Lines of the name table for a `LevelRows`, which is `LTX2AdaLayerNormSingle` in Diffusers.

    `count` is the number of vectors that it computes, as in names of sizes; "" for one vector.
    """
    inner = f"{theirs}.emb.timestep_embedder"
    return (
        *linear_rows(f"{ours}.level.linear_1", f"{inner}.linear_1", width, "W", **exists),
        *linear_rows(f"{ours}.level.linear_2", f"{inner}.linear_2", width, width, **exists),
        *linear_rows(f"{ours}.rows", f"{theirs}.linear", f"{count}{width}", width, **exists),
    )


def _table(ours: str, theirs: str, rows: str, width: str, **options: Any) -> Row:
    return Row(ours, (theirs,), _REPLICATED, (rows, width), **options)


@dataclass(frozen=True, slots=True)
class _StreamNames:
    """Prefixes of the names of a stream's modules, and letters for the stream's sizes."""

    ours: str
    """Prefix of our names."""
    theirs: str
    """Prefix of Diffusers' names."""
    name: str
    """Diffusers' word for the stream."""
    gate: str
    """Diffusers' word for the attention to the other stream."""
    width: str
    """Letter for the width of the stream."""
    other: str
    """Letter for the width of the other stream."""
    hidden: str
    """Letter for the hidden width of the MLP."""
    features: str
    """Letter for the number of features of a token."""
    text: str
    """Letter for the width of captions."""

    @property
    def inside(self) -> str:
        """Name of our `StreamEmbedding` of the stream."""
        return f"{self.ours or 'video_'}in"


_VIDEO = _StreamNames("", "", "video", "a2v", "D", "A", "F", "C", "E")
_SOUND = _StreamNames("sound_", "audio_", "audio", "v2a", "A", "D", "G", "B", "S")
_ACROSS = {
    "video": ("sound_to_video", "audio_to_video_attn"),
    "audio": ("video_to_sound", "video_to_audio_attn"),
}


def _embedding_rows(one: _StreamNames) -> tuple[Row, ...]:
    """Lines of the name table for the embeddings of a stream: tokens, timesteps, captions."""
    inside, theirs, width = one.inside, one.theirs, one.width
    ours, caption = f"{inside}.text_embedder", f"{theirs}caption_projection"
    projects: Any = {"exists": _projects}
    between, gate = f"av_cross_attn_{one.name}_scale_shift", f"{one.name}_{one.gate}_gate"
    told = f"{theirs}prompt_adaln"
    return (
        *linear_rows(f"{inside}.patches", f"{theirs}proj_in", width, one.features),
        *_level_rows(f"{inside}.levels", f"{theirs}time_embed", width, "R"),
        *_level_rows(f"{inside}.between", between, width, "4"),
        *_level_rows(f"{inside}.gates", f"av_cross_attn_{gate}", width, ""),
        *_level_rows(f"{inside}.text_levels", told, width, "2", exists=_told),
        *linear_rows(f"{ours}.linear_1", f"{caption}.linear_1", width, one.text, **projects),
        *linear_rows(f"{ours}.linear_2", f"{caption}.linear_2", width, width, **projects),
    )


def _table_rows(one: _StreamNames) -> tuple[Row, ...]:
    """Lines of the name table for the tables of a stream in the layers."""
    ours, theirs, width = f"{_LAYER}.{one.ours}", f"{_BLOCK}.{one.theirs}", one.width
    text = f"{theirs}prompt_scale_shift_table"
    between = f"{_BLOCK}.{one.name}_a2v_cross_attn_scale_shift_table"
    return (
        _table(f"{ours}modulation.table", f"{theirs}scale_shift_table", "R", width),
        _table(f"{ours}text_table.table", text, "2", width, exists=_modulated),
        _table(f"{ours}between.table", between, "5", width),
    )


def _feed_rows(one: _StreamNames) -> Iterator[Row]:
    """Lines of the name table for the MLP of a stream."""
    mlp, ff = f"{_LAYER}.{one.ours}mlp", f"{_BLOCK}.{one.theirs}ff.net"
    width, hidden = one.width, one.hidden
    rows = (
        *linear_rows(f"{mlp}.linear_fc1", f"{ff}.0.proj", hidden, width, split=_COLUMN),
        *linear_rows(f"{mlp}.linear_fc2", f"{ff}.2", width, hidden, split=_ROW),
    )
    for row in rows:
        is_bias = row.ours.endswith(".bias") and one is _VIDEO
        yield replace(row, exists=lambda model: model.video_mlp_bias) if is_bias else row


def _stream_rows(one: _StreamNames) -> tuple[Row, ...]:
    """Lines of the name table for a whole stream: embeddings, modules in the layers, head."""
    ours, theirs, width = one.ours, one.theirs, one.width
    own = (width, width, width)
    return (
        *_embedding_rows(one),
        *_table_rows(one),
        *_attention_rows(f"{ours}self_attention", f"{theirs}attn1", own),
        *_attention_rows(f"{ours}cross_attention", f"{theirs}attn2", own),
        *_attention_rows(*_ACROSS[one.name], (width, one.other, "A")),
        *_feed_rows(one),
        _table(f"{ours}modulate_out.table", f"{theirs}scale_shift_table", "2", width),
        *linear_rows(f"{ours}proj_out", f"{theirs}proj_out", one.features, width),
    )


CONNECTORS = "connectors"
"""Name of the connectors' folder in a pipeline."""


def _connector_rows(one: _StreamNames, number: int) -> Iterator[Row]:
    """Lines of the name table for layer `number` of the connector of the stream `one`."""
    at = f"{CONNECTORS}.{one.name}_connector.transformer_blocks.{number}"
    attention, mlp = (f"{one.inside}.connector.{part}_{number}" for part in ("attention", "mlp"))
    width, size = one.text, "crossattn_emb_size" if one is _VIDEO else "sound_text_size"
    column: Any = {"split": _COLUMN}
    heads = ByOwnHead(heads="heads_of_connectors", width=size)
    parts = tuple(f"{at}.attn1.to_{letter}" for letter in "qkv")
    gate = f"{at}.attn1.to_gate_logits", "CH", width
    norms = (
        Row(
            f"{attention}.across_heads.{a}_scale",
            (f"{at}.attn1.norm_{b}.weight",),
            _COLUMN,
            (width,),
        )
        for a, b in (("query", "q"), ("key", "k"))
    )
    own = (
        *linear_rows(
            f"{attention}.linear_qkv", parts, f"3{width}", width, **column, arrangement=heads
        ),
        *norms,
        *linear_rows(f"{attention}.linear_proj", f"{at}.attn1.to_out.0", width, width, split=_ROW),
        *linear_rows(f"{mlp}.linear_fc1", f"{at}.ff.net.0.proj", f"4{width}", width, **column),
        *linear_rows(f"{mlp}.linear_fc2", f"{at}.ff.net.2", width, f"4{width}", split=_ROW),
    )

    def exists(model: Any) -> bool:
        return model.has_connectors and number < model.layers_of_connectors

    yield from (replace(row, exists=exists) for row in own)
    gates = linear_rows(f"{attention}.linear_heads", *gate, **column)
    yield from (replace(row, exists=lambda m: exists(m) and m.head_gates) for row in gates)


def _connectors_rows() -> Iterator[Row]:
    for one in (_VIDEO, _SOUND):
        theirs = f"{CONNECTORS}.{one.name}_connector.learnable_registers"
        ours, has = f"{one.inside}.connector.registers", {"exists": lambda m: m.has_connectors}
        yield _table(ours, theirs, "CR", one.text, **has)
        for number in range(MOST_CONNECTOR_LAYERS):
            yield from _connector_rows(one, number)


_KEYFRAMES = Row(
    "keyframes",
    ("keyframes_abs_pos_embedding",),
    _REPLICATED,
    ("1", "D"),
    exists=lambda model: model.keyframe_embedding,
)


def _sizes(model: Ltx2Config) -> dict[str, int]:
    widths = {"D": model.hidden_size, "A": model.sound_hidden_size}
    widths |= {"E": model.crossattn_emb_size, "S": model.sound_text_size}
    rows = {"R": model.table_rows, "2": 2, "3": 3, "4": 4}
    return {
        **widths,
        **{
            f"{count}{name}": n * size for count, n in rows.items() for name, size in widths.items()
        },
        **{"R": model.table_rows, "1": 1, "2": 2, "5": 5},
        "F": model.ffn_hidden_size,
        "G": model.sound_ffn_size,
        "H": model.num_attention_heads,
        "W": LEVEL_WAVES,
        "CH": model.heads_of_connectors,
        "CR": model.connector_registers,
        "C": model.patch_features,
        "B": model.sound_channels,
    }


_FIXED = {
    "patch_size_t": 1,
    "vae_scale_factors": (8, 32, 32),
    "pos_embed_max_pos": 20,
    "base_height": 2048,
    "base_width": 2048,
    "audio_patch_size": 1,
    "audio_patch_size_t": 1,
    "audio_scale_factor": 4,
    "audio_pos_embed_max_pos": 20,
    "audio_sampling_rate": 16000,
    "audio_hop_length": 160,
    "activation_fn": "gelu-approximate",
    "qk_norm": "rms_norm_across_heads",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "attention_bias": True,
    "attention_out_bias": True,
    "rope_theta": 10000.0,
    "rope_double_precision": True,
    "causal_offset": 1,
    "timestep_scale_multiplier": 1000,
    "cross_attn_timestep_scale_multiplier": 1000,
    "audio_ff_bias": True,
}
"""Keys of config.json that must have this value, which is Diffusers' default."""
_ROPE = "split"


def _rules(t: Any) -> list[Rule]:
    heads, width = t.num_attention_heads, t.num_attention_heads * t.attention_head_dim
    sound = t.audio_num_attention_heads * t.audio_attention_head_dim
    found = {key: getattr(t, key) for key in _FIXED}
    alike = {"gated_attn": "audio_gated_attn", "cross_attn_mod": "audio_cross_attn_mod"}
    sizes = {
        "cross_attention_dim": (t.cross_attention_dim, width),
        "audio_cross_attention_dim": (t.audio_cross_attention_dim, sound),
    }
    return [
        *(
            (found[key] == value, f"{key}={found[key]!r} must be {value!r}")
            for key, value in _FIXED.items()
        ),
        (t.rope_type == _ROPE, f"rope_type={t.rope_type!r} must be {_ROPE!r}"),
        *(
            (
                getattr(t, one) == getattr(t, other),
                f"{one}={getattr(t, one)} must be equal to {other}={getattr(t, other)}",
            )
            for one, other in alike.items()
        ),
        *(
            (own == one, f"{key}={own} must be {one}, the width of its stream")
            for key, (own, one) in sizes.items()
        ),
        (
            t.audio_num_attention_heads == heads,
            f"audio_num_attention_heads={t.audio_num_attention_heads} must be equal to"
            f" num_attention_heads={heads}",
        ),
        outputs_as_inputs(t),
        (
            t.audio_out_channels in (None, t.audio_in_channels),
            f"audio_out_channels={t.audio_out_channels} must be equal to"
            f" audio_in_channels={t.audio_in_channels}",
        ),
        (
            t.in_channels % t.patch_size**2 == 0,
            f"in_channels={t.in_channels} must be a multiple of {t.patch_size**2}, the number of"
            " latent pixels in a patch (patch_size * patch_size)",
        ),
    ]


def _text_modulation(t: Any) -> TextModulation:
    if not t.cross_attn_mod:
        return TextModulation.NONE
    return TextModulation.TOLD if t.use_prompt_adaln_single else TextModulation.TABLE


def _text_widths(t: Any) -> tuple[int, int]:
    """(width of captions for the video, width of captions for the sound)."""
    if t.use_prompt_embeddings:
        return t.caption_channels, t.caption_channels
    return t.cross_attention_dim, t.audio_cross_attention_dim


KEYS = ConfigKeys(
    keys=(
        Key(
            "in_channels",
            "in_channels",
            128,
            read=lambda t: t.in_channels // t.patch_size**2,
            write=lambda m: m.patch_features,
        ),
        Key("out_channels", default=128, type=PositiveInt | None, write=lambda m: m.patch_features),
        Key("patch_size", "patch_spatial", 1),
        same("num_attention_heads", 32),
        heads_of(128),
        Key("cross_attention_dim", default=4096, write=lambda m: m.hidden_size),
        Key("gated_attn", "head_gates", False),
        Key("cross_attn_mod", default=False, write=_modulated),
        Key("audio_in_channels", "sound_channels", 128),
        Key(
            "audio_out_channels",
            default=128,
            type=PositiveInt | None,
            write=lambda m: m.sound_channels,
        ),
        Key("audio_num_attention_heads", default=32, write=lambda m: m.num_attention_heads),
        Key(
            "audio_attention_head_dim",
            "sound_hidden_size",
            64,
            read=lambda t: t.audio_num_attention_heads * t.audio_attention_head_dim,
            write=lambda m: m.sound_hidden_size // m.num_attention_heads,
        ),
        Key("audio_cross_attention_dim", default=2048, write=lambda m: m.sound_hidden_size),
        Key("audio_gated_attn", default=False, write=_gates),
        Key("audio_cross_attn_mod", default=False, write=_modulated),
        same("num_layers", 48),
        Key(
            "caption_channels",
            ("crossattn_emb_size", "sound_text_size"),
            3840,
            read=_text_widths,
            write=lambda m: m.crossattn_emb_size if m.text_projections else 3840,
        ),
        Key("rope_type", default="interleaved", write=lambda _: _ROPE),
        Key("use_prompt_embeddings", "text_projections", True),
        # Whether guidance can skip attention in some layers; this needs no weights.
        Key("perturbed_attn", default=False, write=_gates),
        Key("ff_bias", "video_mlp_bias", True),
        Key(
            "use_prompt_adaln_single",
            "text_modulation",
            True,
            read=_text_modulation,
            write=lambda m: m.text_modulation is not TextModulation.TABLE,
        ),
        Key("use_keyframes_abs_pos_embedding", "keyframe_embedding", False),
        *(Key(name, default=value) for name, value in _FIXED.items()),
    ),
    kept=(
        OwnKey(
            "cross_levels",
            str,
            published=lambda _: CrossLevels.OTHER,
            read=CrossLevels,
            may_be_told=True,
        ),
        OwnKey(
            "text_connectors",
            str,
            published=lambda _: TextConnectors.STORED,
            read=TextConnectors,
            default=TextConnectors.STORED,
            may_be_told=True,
        ),
        OwnKey(
            "sound_rate",
            float,
            published=lambda _: SOUND_RATE,
            read=float,
            default=SOUND_RATE,
            may_be_told=True,
        ),
        *(
            OwnKey(name, int, published=lambda _, n=n: n, read=int, default=n, may_be_told=True)
            for name, n in (("reference_latents", 0), ("reference_scale", 1))
        ),
    ),
    rules=_rules,
)


def _rules_of_connectors(t: Any) -> list[Rule]:
    """Rules for `t`, the connectors' config.json; if one is broken, they cannot be imported."""
    pairs = {
        "connector_num_layers": (t.video_connector_num_layers, t.audio_connector_num_layers),
        "connector_num_attention_heads": (
            t.video_connector_num_attention_heads,
            t.audio_connector_num_attention_heads,
        ),
        "connector_num_learnable_registers": (
            t.video_connector_num_learnable_registers,
            t.audio_connector_num_learnable_registers,
        ),
        "gated_attn": (t.video_gated_attn, t.audio_gated_attn),
    }
    fixed = {"connector_rope_base_seq_len": 4096, "rope_theta": 10000.0}
    fixed |= {"rope_double_precision": True, "rope_type": _ROPE}
    found = {key: getattr(t, key) for key in fixed}
    return [
        *(
            (one == other, f"video_{name}={one} and audio_{name}={other} must be equal")
            for name, (one, other) in pairs.items()
        ),
        *(
            (found[key] == value, f"{key}={found[key]!r} must be {value!r}")
            for key, value in fixed.items()
        ),
    ]


def _connector_keys(name: str, field: str, default: int, value: str = "") -> tuple[Key, Key]:
    """The keys `name` of config.json for the two connectors, whose values are equal.

    Our field is `field`. An export writes the attribute `value` of the configuration, or `field`
    if `value` is empty.
    """

    def write(model: Any) -> int:
        return getattr(model, value or field)

    return (
        Key(f"video_connector_{name}", field, default, write=write),
        Key(f"audio_connector_{name}", default=default, write=write),
    )


_COMPANION = Companion(
    folder=CONNECTORS,
    class_name="LTX2TextConnectors",
    module="diffusers.pipelines.ltx2.connectors",
    field="text_connectors",
    value=TextConnectors.FROZEN,
    instead=TextConnectors.STORED,
    # Their folder also has projections of the text encoder's states, which come before the states
    # in the shards.
    frozen=("video_text_proj_in.*", "audio_text_proj_in.*", "text_proj_in.*"),
    keys=ConfigKeys(
        keys=(
            Key("caption_channels", default=3840),
            Key("text_proj_in_factor", default=49),
            *_connector_keys("num_attention_heads", "connector_heads", 30, "heads_of_connectors"),
            *(
                Key(
                    f"{one}_connector_attention_head_dim",
                    default=128,
                    write=lambda m, size=size: getattr(m, size) // m.heads_of_connectors,
                )
                for one, size in (("video", "crossattn_emb_size"), ("audio", "sound_text_size"))
            ),
            *_connector_keys("num_layers", "connector_layers", 2, "layers_of_connectors"),
            *_connector_keys("num_learnable_registers", "connector_registers", 128),
            Key("video_gated_attn", default=False, write=_gates),
            Key("audio_gated_attn", default=False, write=_gates),
            Key("connector_rope_base_seq_len", default=4096),
            Key("rope_theta", default=10000.0),
            Key("rope_double_precision", default=True),
            Key("causal_temporal_positioning", default=False),
            Key("rope_type", default="interleaved", write=lambda _: _ROPE),
            Key("per_modality_projections", default=False, write=lambda m: not _projects(m)),
            Key("video_hidden_dim", default=4096, write=lambda m: m.hidden_size),
            Key("audio_hidden_dim", default=2048, write=lambda m: m.sound_hidden_size),
            Key("proj_bias", default=False, write=lambda m: not _projects(m)),
        ),
        rules=_rules_of_connectors,
    ),
)


def _inexpressible(model: Ltx2Config) -> list[str]:
    same_text = model.crossattn_emb_size == model.sound_text_size
    words = (
        f"model.sound_text_size={model.sound_text_size} cannot be exported: with"
        f" text_projections=true, Diffusers' {CLASS} needs it to be equal to"
        f" model.crossattn_emb_size={model.crossattn_emb_size}"
    )
    return [
        *mlp_misfit(model, CLASS),
        *([] if same_text or not model.text_projections else [words]),
    ]


def _filled_up(connector: Any, rows_1LE: Tensor, model: Ltx2Config) -> Tensor:
    """The output of Diffusers' `connector` for a caption [1, L, E], padded at its beginning."""
    import torch
    from torch.nn.functional import pad

    free = model.connector_rows - rows_1LE.shape[1]
    mask = torch.zeros(1, 1, 1, model.connector_rows)
    mask[..., :free] = torch.finfo(torch.float32).min
    return connector(pad(rows_1LE, (0, 0, free, 0)), mask)[0]


def _run_network(network: Any, sample: LatentSample, level: float, model: Any) -> Tensor:
    """The output [C, F, H, W] of Diffusers' network for the latent of one sample.

    If the sample has sound or references, the network gets them, too.
    """
    import torch

    from dit.models.positions import patchify, unpatchify

    patch = model.patch_temporal, model.patch_spatial
    latent, given = sample.latent_CFHW, sample.others.get(FIRST_FRAME)
    if given is not None and given.shape[1] < latent.shape[1]:
        latent = torch.cat([given, latent[:, given.shape[1] :]], dim=1)
    references = [one for name, one in sample.others.items() if name.startswith(REFERENCE)]
    cut = [patchify(one, *patch) for one in (latent, *references)]
    grid, rows_TC = cut[0][0], torch.cat([rows for _, rows in cut])
    told_T = torch.zeros(len(rows_TC))
    told_T[: len(cut[0][1])] = level
    if latent is not sample.latent_CFHW:
        told_T[: given.shape[1] * grid[1] * grid[2]] = 0  # type: ignore[union-attr]
    told = torch.tensor([level])
    text, heard = sample.text_LE[None], sample.others.get(SOUND_TEXT, sample.text_LE)[None]
    if model.has_connectors:
        text, heard = (
            _filled_up(network.connectors.get_submodule(f"{one}_connector"), rows, model)
            for one, rows in (("video", text), ("audio", heard))
        )
    fps = 24.0 if sample.fps != sample.fps else sample.fps
    sound_KA = sample.others.get(SOUND)
    if isolated := sound_KA is None:
        sound_KA = torch.zeros(network.config.audio_in_channels, 1)
    made, _ = network(
        hidden_states=rows_TC[None],
        audio_hidden_states=sound_KA.T[None],
        encoder_hidden_states=text,
        audio_encoder_hidden_states=heard,
        timestep=told_T[None],
        audio_timestep=told,
        sigma=told,
        audio_sigma=told,
        video_coords=video_coordinates(network, [grid for grid, _ in cut], fps, model),
        audio_num_frames=sound_KA.shape[1],
        isolate_modalities=isolated,
        use_cross_timestep=model.cross_levels is CrossLevels.OTHER,
        return_dict=False,
    )
    return unpatchify(made[0], grid, *patch)


def video_coordinates(network: Any, grids: Sequence[Grid], fps: float, model: Ltx2Config) -> Tensor:
    """`video_coords` [1, 3, T, 2] that Diffusers' `network` takes for a target and its references.

    `grids` are those of the target and of its references. The numbers are the seconds, pixel rows
    and pixel columns at which each token begins and ends, as in `LTX2InContextPipeline`.
    """
    import torch

    side, parts = model.patch_spatial, []
    for number, (frames, rows, columns) in enumerate(grids):
        size = (1, frames, rows * side, columns * side)
        part = network.rope.prepare_video_coords(*size, torch.device("cpu"), fps=fps)
        part[:, 1:] *= model.reference_scale if number else 1
        parts.append(part)
    return torch.cat(parts, dim=2)


_RENAMED = {
    "patchify_proj": "proj_in",
    "audio_patchify_proj": "audio_proj_in",
    "adaln_single": "time_embed",
    "audio_adaln_single": "audio_time_embed",
    "prompt_adaln_single": "prompt_adaln",
    "audio_prompt_adaln_single": "audio_prompt_adaln",
    "av_ca_video_scale_shift_adaln_single": "av_cross_attn_video_scale_shift",
    "av_ca_audio_scale_shift_adaln_single": "av_cross_attn_audio_scale_shift",
    "av_ca_a2v_gate_adaln_single": "av_cross_attn_video_a2v_gate",
    "av_ca_v2a_gate_adaln_single": "av_cross_attn_audio_v2a_gate",
    "scale_shift_table_a2v_ca_video": "video_a2v_cross_attn_scale_shift_table",
    "scale_shift_table_a2v_ca_audio": "audio_a2v_cross_attn_scale_shift_table",
    "q_norm": "norm_q",
    "k_norm": "norm_k",
}
"""Maps words in the tensor names of Lightricks' code and ComfyUI to Diffusers' words."""
_BACK = {theirs: own for own, theirs in _RENAMED.items()}
_ROWS = (*_stream_rows(_VIDEO), *_stream_rows(_SOUND), _KEYFRAMES, *_connectors_rows())
_TABLE = NameTable(rows=_ROWS, sizes=_sizes, layers=lambda model: {"blocks": model.num_layers})


def _with_words(name: str, words: Mapping[str, str]) -> str:
    return ".".join(words.get(word, word) for word in name.split("."))


LTX2_NAMES: dict[str, str] = {
    _with_words(name, _BACK): name
    for name in own_names(_TABLE)
    if not name.startswith(f"{CONNECTORS}.")
}
"""Diffusers' names of linears by their names in Lightricks' code and in ComfyUI."""
_PREFIX = "model.diffusion_model."
_OTHER_PARTS = ("vae.", "audio_vae.", "vocoder.", "text_embedding_projection.")
_CONNECTORS = ("video_embeddings_connector.", "audio_embeddings_connector.")
HEADS = 32
"""Number of heads of the published networks; it does not follow from the tensors of 2.0."""


def _name_in_file(name: str) -> str | None:
    name = name.removeprefix(_PREFIX)
    if name.startswith((*_OTHER_PARTS, *_CONNECTORS)):
        return None
    return _with_words(name, _RENAMED)


def _config_of_file(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | None:
    """The content of config.json for tensors of these `shapes`; None if they are not LTX-2's."""
    first = "transformer_blocks.0"
    if not {"proj_in.weight", "audio_proj_in.weight", f"{first}.scale_shift_table"} <= {*shapes}:
        return None
    (width, channels), (sound, of_sound) = (
        shapes[f"{prefix}proj_in.weight"] for prefix in ("", "audio_")
    )
    gates = shapes.get(f"{first}.attn1.to_gate_logits.weight")
    heads = HEADS if gates is None else gates[0]
    modulated = f"{first}.prompt_scale_shift_table" in shapes
    caption = shapes.get("caption_projection.linear_1.weight")
    numbers = [int(name.split(".")[1]) for name in shapes if name.startswith("transformer_blocks.")]
    told = {"gated_attn": gates is not None, "cross_attn_mod": modulated}
    return {
        "_class_name": CLASS,
        **{"in_channels": channels, "out_channels": channels},
        **{"audio_in_channels": of_sound, "audio_out_channels": of_sound},
        **{"num_attention_heads": heads, "audio_num_attention_heads": heads},
        **{"attention_head_dim": width // heads, "audio_attention_head_dim": sound // heads},
        **{"cross_attention_dim": width, "audio_cross_attention_dim": sound},
        **{f"{prefix}{key}": value for key, value in told.items() for prefix in ("", "audio_")},
        "num_layers": 1 + max(numbers),
        "rope_type": _ROPE,
        "perturbed_attn": gates is not None,
        "use_prompt_embeddings": caption is not None,
        "use_prompt_adaln_single": not modulated or "prompt_adaln.linear.weight" in shapes,
        "ff_bias": f"{first}.ff.net.0.proj.bias" in shapes,
        "use_keyframes_abs_pos_embedding": "keyframes_abs_pos_embedding" in shapes,
        **({} if caption is None else {"caption_channels": caption[1]}),
    }


_PIPELINES = ("LTX2Pipeline", "LTX2ImageToVideoPipeline", "LTX2ConditionPipeline")
FORM = DiffusersForm(
    class_name=CLASS,
    table=_TABLE,
    keys=KEYS,
    inexpressible=_inexpressible,
    companion=_COMPANION,
    original_names=(LTX2_NAMES,),
    single_file=SingleFile(renamed=_name_in_file, config=_config_of_file),
    comfyui_names=lambda _: LTX2_NAMES,
    pipelines={name: Pipeline() for name in _PIPELINES},
    run_network=_run_network,
)
