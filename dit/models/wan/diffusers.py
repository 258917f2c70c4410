"""Wan in Diffusers, `WanTransformer3DModel`: names of tensors, config.json, pipelines, calls."""

# D model width, F width of the MLP, W width of the sinusoidal timestep embedding, E text width
# I width of image states, S image states of a sample, C outputs of a token, P inputs of a token

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from dit.config.checks import Rule
from dit.models.diffusers.arrangements import (
    THWC,
    ByHead,
    Convolution,
    Features,
    LeadingOne,
    RotaryPairs,
)
from dit.models.diffusers.form import (
    VIDEO_PATCH,
    ConfigKeys,
    DiffusersForm,
    Key,
    OwnKey,
    Pipeline,
    heads_of,
    same,
)
from dit.models.diffusers.names import NameTable, Row, TensorSplit, linear_rows
from dit.models.joint.tensor_names import layer_norm_rows
from dit.models.wan.family import (
    CONDITION,
    FIRST_FRAME,
    IMAGE,
    MASK_CHANNELS,
    ImageCondition,
    WanConfig,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample

CLASS = "WanTransformer3DModel"
GATE = "to_gate_compress"
"""Name of the gate of sparse attention in FastVideo; Diffusers' network has no such gate."""
_SHARE = WanConfig().sparse_share
_TEXT_ROWS = 512  # text_pad_to of the published weights; Diffusers fixes it with images
_CHANNELS_OF_VAE_2_2 = 48
_ACROSS = "rms_norm_across_heads"
_ROTARY_LENGTH = 1024  # patches along an axis
_LAYER, _BLOCK = "blocks.layers.*", "blocks.*"
_SELF, _CROSS = f"{_LAYER}.self_attention", f"{_LAYER}.cross_attention"
_REPLICATED, _COLUMN, _ROW = TensorSplit.REPLICATED, TensorSplit.COLUMN, TensorSplit.ROW


def _has_image(model: WanConfig) -> bool:
    return model.image_embed_size is not None


def _heads_norm(ours: str, theirs: str, **options: Any) -> Row:
    """The line of the name table for an RMSNorm over all heads of a token."""
    return Row(f"{ours}_scale", (f"{theirs}.weight",), _COLUMN, ("D",), **options)


def _table(ours: str, theirs: str, rows: str) -> Row:
    return Row(f"{ours}.table", (theirs,), _REPLICATED, (rows, "D"), LeadingOne())


_EMBEDDERS: tuple[Row, ...] = (
    *linear_rows("patches", "patch_embedding", "D", "P", arrangement=Convolution()),
    *linear_rows("level.linear_1", "condition_embedder.time_embedder.linear_1", "D", "W"),
    *linear_rows("level.linear_2", "condition_embedder.time_embedder.linear_2", "D", "D"),
    *linear_rows("level.linear_out", "condition_embedder.time_proj", "6D", "D"),
    *linear_rows("text_embedder.linear_1", "condition_embedder.text_embedder.linear_1", "D", "E"),
    *linear_rows("text_embedder.linear_2", "condition_embedder.text_embedder.linear_2", "D", "D"),
)
_THEIR_IMAGE = "condition_embedder.image_embedder"
_IMAGE_MLP = f"{_THEIR_IMAGE}.ff.net"
_IMAGE_EMBEDDER: tuple[Row, ...] = (
    Row(
        "image_embedder.positions",
        (f"{_THEIR_IMAGE}.pos_embed",),
        _REPLICATED,
        ("S", "I"),
        LeadingOne(),
        exists=lambda model: model.image_embed_positions,
    ),
    *layer_norm_rows("image_embedder.norm_in", f"{_THEIR_IMAGE}.norm1", "I", exists=_has_image),
    *linear_rows("image_embedder.linear_1", f"{_IMAGE_MLP}.0.proj", "I", "I", exists=_has_image),
    *linear_rows("image_embedder.linear_2", f"{_IMAGE_MLP}.2", "D", "I", exists=_has_image),
    *layer_norm_rows("image_embedder.norm_out", f"{_THEIR_IMAGE}.norm2", "D", exists=_has_image),
)


def _parts(block: str, letters: str) -> tuple[str, ...]:
    return tuple(f"{block}.to_{letter}" for letter in letters)


_LAYERS: tuple[Row, ...] = (
    _table(f"{_LAYER}.modulation", f"{_BLOCK}.scale_shift_table", "6"),
    *linear_rows(
        f"{_SELF}.linear_qkv",
        _parts(f"{_BLOCK}.attn1", "qkv"),
        *("3D", "D"),
        split=_COLUMN,
        # Diffusers rotates adjacent numbers as a pair, our network numbers half a head apart.
        arrangement=ByHead(rotated=(0, 1)),
    ),
    *linear_rows(
        f"{_SELF}.linear_gate",
        f"{_BLOCK}.{GATE}",
        *("D", "D"),
        split=_COLUMN,
        exists=lambda model: model.sparse_attention,
    ),
    _heads_norm(f"{_SELF}.across_heads.query", f"{_BLOCK}.attn1.norm_q", arrangement=RotaryPairs()),
    _heads_norm(f"{_SELF}.across_heads.key", f"{_BLOCK}.attn1.norm_k", arrangement=RotaryPairs()),
    *linear_rows(f"{_SELF}.linear_proj", f"{_BLOCK}.attn1.to_out.0", "D", "D", split=_ROW),
    *layer_norm_rows(f"{_LAYER}.norm_cross", f"{_BLOCK}.norm2", "D"),
    *linear_rows(f"{_CROSS}.linear_q", f"{_BLOCK}.attn2.to_q", "D", "D", split=_COLUMN),
    *linear_rows(
        f"{_CROSS}.linear_kv",
        _parts(f"{_BLOCK}.attn2", "kv"),
        *("2D", "D"),
        split=_COLUMN,
        arrangement=ByHead(),
    ),
    *linear_rows(
        f"{_CROSS}.linear_image_kv",
        (f"{_BLOCK}.attn2.add_k_proj", f"{_BLOCK}.attn2.add_v_proj"),
        *("2D", "D"),
        split=_COLUMN,
        arrangement=ByHead(),
        exists=_has_image,
    ),
    _heads_norm(f"{_CROSS}.across_heads.query", f"{_BLOCK}.attn2.norm_q"),
    _heads_norm(f"{_CROSS}.across_heads.key", f"{_BLOCK}.attn2.norm_k"),
    _heads_norm(
        f"{_CROSS}.across_heads.image_key", f"{_BLOCK}.attn2.norm_added_k", exists=_has_image
    ),
    *linear_rows(f"{_CROSS}.linear_proj", f"{_BLOCK}.attn2.to_out.0", "D", "D", split=_ROW),
    *linear_rows(f"{_LAYER}.mlp.linear_fc1", f"{_BLOCK}.ffn.net.0.proj", "F", "D", split=_COLUMN),
    *linear_rows(f"{_LAYER}.mlp.linear_fc2", f"{_BLOCK}.ffn.net.2", "D", "F", split=_ROW),
)
_HEAD: tuple[Row, ...] = (
    _table("modulate_out", "scale_shift_table", "2"),
    *linear_rows("proj_out", "proj_out", "C", "D", arrangement=Features(THWC)),
)


def _sizes(model: WanConfig) -> dict[str, int]:
    width = model.hidden_size
    return {
        "2": 2,
        "6": 6,
        "D": width,
        "2D": 2 * width,
        "3D": 3 * width,
        "6D": 6 * width,
        "F": model.ffn_hidden_size,
        "W": model.freq_dim,
        "E": model.crossattn_emb_size,
        "I": model.image_embed_size or 0,
        "S": model.image_embed_length,
        "C": model.output_features,
        "P": model.input_features,
    }


_ORIGINAL = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
_ORIGINAL_IMAGE = {"k_img": "add_k_proj", "v_img": "add_v_proj"}
_EMBEDDER = "condition_embedder"

WAN_NAMES: dict[str, str] = {
    **{f"blocks.*.self_attn.{a}": f"blocks.*.attn1.{b}" for a, b in _ORIGINAL.items()},
    **{f"blocks.*.cross_attn.{a}": f"blocks.*.attn2.{b}" for a, b in _ORIGINAL.items()},
    **{f"blocks.*.cross_attn.{a}": f"blocks.*.attn2.{b}" for a, b in _ORIGINAL_IMAGE.items()},
    "blocks.*.ffn.0": "blocks.*.ffn.net.0.proj",
    "blocks.*.ffn.2": "blocks.*.ffn.net.2",
    "time_embedding.0": f"{_EMBEDDER}.time_embedder.linear_1",
    "time_embedding.2": f"{_EMBEDDER}.time_embedder.linear_2",
    "time_projection.1": f"{_EMBEDDER}.time_proj",
    "text_embedding.0": f"{_EMBEDDER}.text_embedder.linear_1",
    "text_embedding.2": f"{_EMBEDDER}.text_embedder.linear_2",
    "img_emb.proj.1": f"{_EMBEDDER}.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": f"{_EMBEDDER}.image_embedder.ff.net.2",
    "head.head": "proj_out",
}
"""Diffusers' names of linears by their names in Wan's code."""


def _latent_channels(t: Any) -> int:
    return t.out_channels or t.in_channels


def _shows_channels(t: Any) -> bool:
    """Whether the network of a config.json `t` gets a mask and a condition latent as channels."""
    return t.in_channels == 2 * _latent_channels(t) + MASK_CHANNELS


def _width(t: Any) -> int:
    return t.num_attention_heads * t.attention_head_dim


def _rules(t: Any) -> list[Rule]:
    width, image, channels = _width(t), t.image_dim is not None, _latent_channels(t)
    return [
        (
            _shows_channels(t) or t.in_channels == channels,
            f"in_channels={t.in_channels} must be {channels} or {2 * channels + MASK_CHANNELS} for"
            f" out_channels={channels}",
        ),
        (
            t.patch_size[1] == t.patch_size[2],
            f"patch_size={list(t.patch_size)} must have equal rows and columns",
        ),
        (t.cross_attn_norm, "cross_attn_norm=false must be true"),
        (t.qk_norm == _ACROSS, f'qk_norm={t.qk_norm!r} must be "{_ACROSS}"'),
        (t.eps == 1e-6, f"eps={t.eps:g} must be 1e-06"),
        (
            t.added_kv_proj_dim == (width if image else None),
            f"added_kv_proj_dim={t.added_kv_proj_dim} must be {width} (num_attention_heads *"
            f" attention_head_dim) with image_dim, else null; image_dim={t.image_dim}",
        ),
        (
            image or t.pos_embed_seq_len is None,
            f"pos_embed_seq_len={t.pos_embed_seq_len} must be null without image_dim",
        ),
    ]


def _condition(t: Any) -> ImageCondition:
    """`model.image_condition` of a published network, inferred from its config.json `t`."""
    if _shows_channels(t):
        two = t.pos_embed_seq_len is not None
        return ImageCondition.FIRST_AND_LAST_FRAME if two else ImageCondition.FIRST_FRAME
    clean = _latent_channels(t) == _CHANNELS_OF_VAE_2_2
    return ImageCondition.CLEAN_FIRST_FRAME if clean else ImageCondition.NONE


def _switch(value: Any) -> bool:
    """`value` as a Boolean; it may be the text "true" or "false" of a user.

    Raises:
        ValueError: it is another text; the message follows "model.sparse_attention=VALUE must be".
    """
    if isinstance(value, bool):
        return value
    if value not in ("true", "false"):
        raise ValueError("true or false, as in model.sparse_attention=true")
    return value == "true"


KEYS = ConfigKeys(
    keys=(
        VIDEO_PATCH,
        same("num_attention_heads", 40),
        heads_of(128),
        Key("in_channels", default=16, write=lambda m: m.in_channels + m.condition_channels),
        Key("out_channels", "in_channels", 16, PositiveInt | None, read=_latent_channels),
        Key("text_dim", "crossattn_emb_size", 4096),
        same("freq_dim", 256),
        Key(
            "ffn_dim",
            "mlp_ratio",
            13824,
            read=lambda t: t.ffn_dim / _width(t),
            write=lambda m: m.ffn_hidden_size,
        ),
        same("num_layers", 40),
        Key("cross_attn_norm", default=True),
        Key("qk_norm", default=_ACROSS, type=str | None),
        Key("eps", default=1e-6),
        Key("image_dim", "image_embed_size", type=PositiveInt | None),
        Key(
            "added_kv_proj_dim",
            type=PositiveInt | None,
            write=lambda m: m.hidden_size if _has_image(m) else None,
        ),
        Key("rope_max_seq_len", default=_ROTARY_LENGTH),
        Key(
            "pos_embed_seq_len",
            "image_embed_positions",
            type=PositiveInt | None,
            read=lambda t: t.pos_embed_seq_len is not None,
            write=lambda m: m.image_embed_length if m.image_embed_positions else None,
        ),
    ),
    kept=(
        OwnKey("text_pad_to", PositiveInt | None, published=lambda _: _TEXT_ROWS),
        OwnKey("image_condition", str, published=_condition, read=ImageCondition),
        OwnKey(
            "sparse_attention",
            bool,
            published=lambda _: False,
            read=_switch,
            default=False,
            may_be_told=True,
        ),
        OwnKey(
            "sparse_share",
            float,
            published=lambda _: _SHARE,
            read=float,
            default=_SHARE,
            may_be_told=True,
        ),
        OwnKey(
            "image_embed_length",
            PositiveInt,
            published=lambda t: t.pos_embed_seq_len or WanConfig().image_embed_length,
        ),
    ),
    rules=_rules,
)


def _inexpressible(model: WanConfig) -> list[str]:
    if not _has_image(model) or model.text_pad_to == _TEXT_ROWS:
        return []
    return [
        f"model.text_pad_to={model.text_pad_to} cannot be exported, because Diffusers' {CLASS} with"
        f" image_embed_size expects captions of {_TEXT_ROWS} tokens. Train with"
        f" model.text_pad_to={_TEXT_ROWS} to export"
    ]


def _beyond(model: WanConfig) -> str | None:
    """A message about the gates of sparse attention in an export; None without them.

    Diffusers' class has no such gates (`DiffusersForm.beyond`).
    """
    if not model.sparse_attention:
        return None
    return (
        f"{GATE}.weight and .bias of each block, with the names of FastVideo, which reads the"
        f" folder with VIDEO_SPARSE_ATTN and VSA_sparsity={1 - model.sparse_share:g}. Diffusers'"
        f" {CLASS} ignores these tensors and attends to all tokens, so its outputs differ"
    )


def _pipeline(name: str, *, shows: bool) -> Pipeline:
    def rules(model: WanConfig) -> list[Rule]:
        condition, padded = model.image_condition, model.text_pad_to
        fits = condition is ImageCondition.CLEAN_FIRST_FRAME
        fits = fits or shows == (condition is not ImageCondition.NONE)
        return [
            (
                padded == _TEXT_ROWS,
                f"model.text_pad_to={padded}, but {name} pads captions with zeros to"
                f" {_TEXT_ROWS} tokens",
            ),
            (
                fits,
                f"model.image_condition={condition}, but {name} passes"
                f" {'a picture' if shows else 'no picture'} to the network",
            ),
        ]

    return Pipeline(rules=rules)


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, model: WanConfig
) -> Tensor:
    import torch
    from torch import nn

    text, latent, image = sample.text_LE, sample.latent_CFHW, sample.others.get(IMAGE)
    if model.text_pad_to is not None:
        text = nn.functional.pad(text, (0, 0, 0, model.text_pad_to - len(text)))
    given, told = sample.others.get(FIRST_FRAME), torch.tensor([level])
    if given is not None:
        latent = torch.cat([given, latent[:, given.shape[1] :]], dim=1)
        patch = (model.patch_temporal, *[model.patch_spatial] * 2)
        shape = [side // p for side, p in zip(latent.shape[1:], patch, strict=True)]
        count = given.shape[1] // model.patch_temporal
        is_given_F11 = (torch.arange(shape[0]) < count).view(-1, 1, 1)
        told = torch.where(is_given_F11, 0.0, level).expand(shape).reshape(1, -1)
    if model.condition_channels:
        mask = latent.new_zeros(MASK_CHANNELS, *latent.shape[1:])
        mask[:, 0] = 1
        if model.image_condition is ImageCondition.FIRST_AND_LAST_FRAME:
            mask[-1, -1] = 1
        latent = torch.cat([latent, mask, sample.others[CONDITION]])
    if image is not None and model.image_embed_positions:
        image = image.unflatten(0, (2, -1))  # the states of two pictures
    elif image is not None:
        image = image[None]
    (made,) = network(
        hidden_states=latent[None],
        timestep=told,
        encoder_hidden_states=text[None],
        encoder_hidden_states_image=image,
        return_dict=False,
    )
    return made[0]


FORM = DiffusersForm(
    class_name=CLASS,
    table=NameTable(
        rows=(*_EMBEDDERS, *_IMAGE_EMBEDDER, *_LAYERS, *_HEAD),
        sizes=_sizes,
        layers=lambda model: {"blocks": model.num_layers},
    ),
    keys=KEYS,
    inexpressible=_inexpressible,
    # Published weights of Wan 2.1's image-to-video contain this tensor, which is not used.
    ignored=("blocks.*.attn2.norm_added_q.weight",),
    added={f"{_BLOCK}.{GATE}.{end}": "model.sparse_attention=true" for end in ("weight", "bias")},
    beyond=_beyond,
    original_names=(WAN_NAMES,),
    comfyui_names=lambda _: WAN_NAMES,
    pipelines={
        name: _pipeline(name, shows=shows)
        for name, shows in {"WanPipeline": False, "WanImageToVideoPipeline": True}.items()
    },
    largest_latent=lambda model: (
        _ROTARY_LENGTH * model.patch_temporal,
        *(_ROTARY_LENGTH * model.patch_spatial,) * 2,
    ),
    call=lambda model: (
        "made = network(state, t.expand(1), caption).sample"
        if model.image_condition is ImageCondition.NONE and not model.sparse_attention
        else None
    ),
    run_network=_run_network,
)
