"""Code shared by Diffusers forms of networks with joint attention: config.json and calls.

FLUX and Chroma have double-stream layers, then single-stream ones. The Hunyuan models refine their
captions; HunyuanVideo 1.5 and HunyuanImage also read ByT5's states.
"""

# B samples, L text tokens, E text width, G tokens of words in quotation marks

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from dit.config import ModelConfig
from dit.config.checks import Rule
from dit.models.diffusers.form import Key, OwnKey, heads_of, same
from dit.models.joint.family import DoubleSingleConfig, HasGlyphs
from dit.models.layer_spec import MOST_REFINER_LAYERS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample
    from dit.models.positions import PositionRule

PATCH = 2
"""Side, in latent cells, of the patches that the pipelines of FLUX and Chroma turn into tokens."""


def channels_of_patches(t: Any) -> int:
    """Number of latent channels, computed from `in_channels` of the config.json `t`.

    `in_channels` is the number of features of a token.

    Raises:
        ValueError: `in_channels` is no multiple of the latent cells in a patch.
    """
    rows, frames = t.kept.patch_spatial, t.kept.patch_temporal
    channels, rest = divmod(t.in_channels, frames * rows**2)
    if rest:
        raise ValueError(
            f"in_channels={t.in_channels} are no patches of {frames} frames x {rows} x {rows}"
        )
    return channels


def double_single_keys(
    *,
    channels: int,
    layers: tuple[int, int],
    heads: int,
    text: int,
    axes: tuple[int, ...],
    outputs: bool = True,
    patch: bool = True,
) -> tuple[Key, ...]:
    """config.json keys of classes with double-stream, then single-stream layers.

    The arguments are the class's defaults: `layers` of both kinds, `text` width, rotary `axes`.
    `outputs` says whether `out_channels` is a key, `patch` whether `patch_size` is.
    """
    return (
        *((Key("patch_size", default=1),) if patch else ()),
        Key(
            "in_channels",
            "in_channels",
            channels,
            read=channels_of_patches,
            write=lambda m: m.patch_features,
        ),
        *((Key("out_channels", type=PositiveInt | None),) if outputs else ()),
        same("num_layers", layers[0]),
        same("num_single_layers", layers[1]),
        heads_of(128),
        same("num_attention_heads", heads),
        Key("joint_attention_dim", "crossattn_emb_size", text),
        Key("axes_dims_rope", "rope_axes", axes),
    )


DOUBLE_SINGLE_KEYS = double_single_keys(
    channels=64, layers=(19, 38), heads=24, text=4096, axes=(16, 56, 56)
)
"""config.json keys of `FluxTransformer2DModel` and `ChromaTransformer2DModel`, with defaults."""


def kept_patch(rows: int) -> tuple[OwnKey, ...]:
    """Private keys that exports add to config.json for the size of patches.

    They are for Diffusers classes without such keys. `rows` is the side of a patch in published
    networks.
    """
    return (
        OwnKey("patch_spatial", PositiveInt, published=lambda _: rows),
        OwnKey("patch_temporal", PositiveInt, published=lambda _: 1),
    )


KEPT_PATCH = kept_patch(PATCH)


def whole_patches(t: Any) -> Rule:
    """The rule that the network of `t` has patches of one cell, as the pipeline cuts patches."""
    return (t.patch_size == 1, f"patch_size={t.patch_size}; patches are cut before the network")


def outputs_as_inputs(t: Any) -> Rule:
    """The rule that `t` has as many output channels as input channels; null stands for equal."""
    return (
        t.out_channels in (None, t.in_channels),
        f"out_channels={t.out_channels} with in_channels={t.in_channels}",
    )


def double_single_rules(t: Any) -> list[Rule]:
    """Rules that a config.json `t` must satisfy for our network to compute what Diffusers' does."""
    return [
        whole_patches(t),
        outputs_as_inputs(t),
    ]


def mlp_ratio(hidden: int, width: int) -> float:
    """The `ModelConfig.mlp_ratio` of a network of width `width` with an MLP of width `hidden`."""
    return next(x for x in (hidden / width, (hidden + 0.5) / width) if int(x * width) == hidden)


def mlp_misfit(model: ModelConfig, class_name: str) -> list[str]:
    """A message why the Diffusers class `class_name` cannot have the MLP of `model`, in a list.

    The list is empty if it can.
    """
    if model.ffn_hidden_size == 4 * model.hidden_size:
        return []
    return [f"model.mlp_ratio={model.mlp_ratio:g} cannot be exported: {class_name} has 4"]


def patch_rules(model: DoubleSingleConfig, *, rows: int = PATCH) -> list[Rule]:
    """`Pipeline.rules` of FLUX and Chroma: a token has `rows` x `rows` latent cells."""
    patch = (model.patch_temporal, model.patch_spatial)
    return [
        (
            patch == (1, rows),
            f"model.patch_temporal={patch[0]} and model.patch_spatial={patch[1]}, and it cuts"
            f" patches of 1 frame x {rows} x {rows}",
        )
    ]


def run_on_patches(
    network: nn.Module,
    latents: Sequence[tuple[Tensor, ...]],
    text_BLE: Tensor,
    model: ModelConfig,
    *,
    fps: float,
    positions: PositionRule | None = None,
    **inputs: Any,
) -> Tensor:
    """Outputs [B, C, F, H, W] of Diffusers' `network` for B samples of one size.

    `latents` has each sample's latent, then its references; `inputs` are further arguments of the
    network's class. Text has position 0 unless `inputs` has `txt_ids`; tokens have those of
    `positions` (None: `GridPositions`).
    """
    import torch

    from dit.models.positions import GridPositions, patchify, unpatchify

    positions = positions or GridPositions()
    patch = (model.patch_temporal, model.patch_spatial)
    cut = [[patchify(latent, *patch) for latent in of_sample] for of_sample in latents]
    grids, device = tuple(grid for grid, _ in cut[0]), text_BLE.device
    inputs.setdefault("txt_ids", torch.zeros(text_BLE.shape[1], positions.axes, device=device))
    (made,) = network(
        hidden_states=torch.stack([torch.cat([rows for _, rows in one]) for one in cut]),
        encoder_hidden_states=text_BLE,
        img_ids=positions(grids, fps=fps).to(device),
        return_dict=False,
        **inputs,
    )
    return torch.stack([unpatchify(one, grids[0], *patch) for one in made])


def run_on_sample(
    network: nn.Module,
    sample: LatentSample,
    level: float,
    model: ModelConfig,
    *,
    references: tuple[Tensor, ...] = (),
    **inputs: Any,
) -> Tensor:
    """Output [C, F, H, W] of Diffusers' `network` for one sample at the timestep `level`.

    `level` is in [0, 1000]. `references` may have any size.
    """
    import torch

    latents, text_BLE = (sample.latent_CFHW, *references), sample.text_LE[None]
    inputs["timestep"] = torch.tensor([level / 1000])  # it multiplies by 1000 itself
    return run_on_patches(network, [latents], text_BLE, model, fps=sample.fps, **inputs)[0]


GLYPH_HIDDEN = 2048
"""Hidden width of the embedding of ByT5's states; fixed in Diffusers."""
_NORM, _THETA = "rms_norm", 256.0


def hunyuan_keys(*, heads: int, layers: int, text: int, axes: Key) -> tuple[Key, ...]:
    """config.json keys that all Hunyuan models have; the arguments are a class's defaults."""
    return (
        same("num_attention_heads", heads),
        heads_of(128),
        same("num_layers", layers),
        same("num_refiner_layers", 2),
        same("mlp_ratio", 4.0),
        Key("qk_norm", default=_NORM, type=str | None),
        Key("text_embed_dim", "crossattn_emb_size", text),
        Key("rope_theta", default=_THETA),
        axes,
    )


def hunyuan_rules(t: Any) -> list[Rule]:
    """Rules that a config.json `t` must satisfy for our networks to compute what Diffusers' do."""
    return [
        (t.qk_norm == _NORM, f"qk_norm={t.qk_norm!r}, not {_NORM}"),
        (t.rope_theta == _THETA, f"rope_theta={t.rope_theta:g}, not {_THETA:g}"),
        (
            t.num_refiner_layers <= MOST_REFINER_LAYERS,
            f"num_refiner_layers={t.num_refiner_layers}, more than {MOST_REFINER_LAYERS}",
        ),
    ]


def first_frame(latent: Tensor, given: Tensor | None) -> tuple[int, Tensor]:
    """(number of conditioning frames, these frames and their mask [C + 1, F, H, W]) for `latent`.

    `given` has the conditioning frames. The last channel is the mask, 1 on these frames; the other
    frames are zeros. If `given` is None or not shorter than `latent`, there are no conditioning
    frames.
    """
    shown = latent.new_zeros(latent.shape[0] + 1, *latent.shape[1:])
    if given is None or given.shape[1] >= latent.shape[1]:
        return 0, shown
    frames = given.shape[1]
    shown[:-1, :frames], shown[-1, :frames] = given, 1
    return frames, shown


def glyph_misfit(model: HasGlyphs, class_name: str) -> list[str]:
    """A message why the Diffusers class `class_name` cannot have our embedding of ByT5's states.

    It is in a list, which is empty if the class can.
    """
    if model.glyph_hidden_size == GLYPH_HIDDEN:
        return []
    return [
        f"model.glyph_hidden_size={model.glyph_hidden_size} cannot be exported: Diffusers'"
        f" {class_name} has {GLYPH_HIDDEN}"
    ]


def text_inputs(model: HasGlyphs, text_LE: Tensor, glyph_GE: Tensor | None) -> dict[str, Tensor]:
    """Arguments of Diffusers' network for a caption, and for ByT5's states of quoted words."""
    if glyph_GE is None:
        glyph_GE = text_LE.new_zeros(0, model.glyph_embed_size)
    return {
        "encoder_hidden_states": text_LE[None],
        "encoder_attention_mask": text_LE.new_ones(1, len(text_LE)),
        "encoder_hidden_states_2": glyph_GE[None],
        "encoder_attention_mask_2": text_LE.new_ones(1, len(glyph_GE)),
    }
