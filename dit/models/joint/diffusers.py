"""Keys of config.json, and calls of Diffusers' networks, for families with joint attention.

FLUX and Chroma have double-stream layers, then single-stream ones. The Hunyuan models have a token
refiner for captions; HunyuanVideo 1.5 and HunyuanImage also get ByT5's states of quoted words.
"""

# B samples, L text tokens, E text width, G tokens of quoted words

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
"""Side of a patch, in latent pixels, in the pipelines of FLUX and Chroma."""


def channels_of_patches(t: Any) -> int:
    """The number of latent channels, from `t`, the keys of a config.json.

    It is the key `in_channels`, the number of features of a token, divided by the number of latent
    pixels in a patch.

    Raises:
        ValueError: `in_channels` is not a multiple of that number.
    """
    rows, frames = t.kept.patch_spatial, t.kept.patch_temporal
    channels, rest = divmod(t.in_channels, frames * rows**2)
    if rest:
        raise ValueError(
            f"in_channels={t.in_channels} must be a multiple of {frames * rows**2}, the number of"
            f" latent pixels in a patch of {frames} x {rows} x {rows} (frames x rows x columns);"
            " correct in_channels in config.json"
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
    """The keys of config.json of a class with double-stream, then single-stream layers.

    The arguments are defaults of the class: `layers` are the numbers of double-stream and
    single-stream layers, `text` is the text width, `axes` the widths of rotary axes. `outputs` says
    whether `out_channels` is a key, `patch` whether `patch_size` is.
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
"""The keys of config.json that `FluxTransformer2DModel` and `ChromaTransformer2DModel` share."""


def kept_patch(rows: int) -> tuple[OwnKey, ...]:
    """Private keys for the size of patches, for Diffusers classes without keys for it.

    `rows` is the side of a patch in published networks.
    """
    return (
        OwnKey("patch_spatial", PositiveInt, published=lambda _: rows),
        OwnKey("patch_temporal", PositiveInt, published=lambda _: 1),
    )


KEPT_PATCH = kept_patch(PATCH)


def whole_patches(t: Any) -> Rule:
    """The rule that `patch_size` in a config.json `t` is 1: pipelines cut patches themselves."""
    return (
        t.patch_size == 1,
        f"patch_size={t.patch_size} must be 1: pipelines cut patches before they call the network",
    )


def outputs_as_inputs(t: Any) -> Rule:
    """The rule that a config.json `t` has as many output as input channels, or null for equal."""
    return (
        t.out_channels in (None, t.in_channels),
        f"out_channels={t.out_channels} must be equal to in_channels={t.in_channels}",
    )


def double_single_rules(t: Any) -> list[Rule]:
    """Rules for a config.json `t` of FLUX or Chroma; our network lacks what they exclude."""
    return [
        whole_patches(t),
        outputs_as_inputs(t),
    ]


def mlp_ratio(hidden: int, width: int) -> float:
    """The ratio with int(ratio * `width`) == `hidden`: `model.mlp_ratio` of an MLP."""
    return next(x for x in (hidden / width, (hidden + 0.5) / width) if int(x * width) == hidden)


def mlp_misfit(model: ModelConfig, class_name: str) -> list[str]:
    """Why the MLP of `model` cannot be exported to the Diffusers class `class_name`.

    The list has one message, or is empty if it can be exported.
    """
    if model.ffn_hidden_size == 4 * model.hidden_size:
        return []
    return [
        f"model.mlp_ratio={model.mlp_ratio:g} cannot be exported: 4 is fixed in Diffusers'"
        f" {class_name}. Train with model.mlp_ratio=4 to export"
    ]


def patch_rules(model: DoubleSingleConfig, *, rows: int = PATCH) -> list[Rule]:
    """`Pipeline.rules` of pipelines that cut patches of 1 frame x `rows` x `rows` latent pixels."""
    patch = (model.patch_temporal, model.patch_spatial)
    return [
        (
            patch == (1, rows),
            f"model.patch_temporal={patch[0]} and model.patch_spatial={patch[1]}, but the pipeline"
            f" cuts patches of 1 frame and {rows} x {rows} latent pixels",
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
    """The outputs [B, C, F, H, W] of Diffusers' `network` for B samples of equal sizes.

    `latents` has, for each sample, its latent, then its references. `inputs` are further arguments
    of the network. `positions` gives the positions of tokens (None: `GridPositions`); the position
    of text is 0 unless `inputs` has `txt_ids`.
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
    """The output [C, F, H, W] of Diffusers' `network` for one sample.

    `level` is the timestep, in [0, 1000]. `references` may have other sizes than the sample.
    `inputs` are further arguments of `run_on_patches`.
    """
    import torch

    latents, text_BLE = (sample.latent_CFHW, *references), sample.text_LE[None]
    inputs["timestep"] = torch.tensor([level / 1000])  # the network multiplies by 1000
    return run_on_patches(network, [latents], text_BLE, model, fps=sample.fps, **inputs)[0]


GLYPH_HIDDEN = 2048
"""Hidden width of the embedding of ByT5's states, which is fixed in Diffusers."""
_NORM, _THETA = "rms_norm", 256.0


def hunyuan_keys(*, heads: int, layers: int, text: int, axes: Key) -> tuple[Key, ...]:
    """The keys of config.json that all Hunyuan models have.

    The arguments are the defaults of a class: numbers of heads and layers, and the text width;
    `axes` is the key for the rotary axes.
    """
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
    """Rules for a config.json `t` of a Hunyuan model; our networks lack what they exclude."""
    return [
        (t.qk_norm == _NORM, f'qk_norm={t.qk_norm!r} must be "{_NORM}"'),
        (t.rope_theta == _THETA, f"rope_theta={t.rope_theta:g} must be {_THETA:g}"),
        (
            t.num_refiner_layers <= MOST_REFINER_LAYERS,
            f"num_refiner_layers={t.num_refiner_layers} must be at most {MOST_REFINER_LAYERS}",
        ),
    ]


def first_frame(latent: Tensor, given: Tensor | None) -> tuple[int, Tensor]:
    """(number of given frames, the given frames and their mask [C + 1, F, H, W]) for `latent`.

    `given` has the given first frames; the result has zeros at all other frames. The last channel
    is the mask, 1 on given frames. If `given` is None or not shorter than `latent`, no frame is
    given.
    """
    shown = latent.new_zeros(latent.shape[0] + 1, *latent.shape[1:])
    if given is None or given.shape[1] >= latent.shape[1]:
        return 0, shown
    frames = given.shape[1]
    shown[:-1, :frames], shown[-1, :frames] = given, 1
    return frames, shown


def glyph_misfit(model: HasGlyphs, class_name: str) -> list[str]:
    """Why our embedding of ByT5's states cannot be exported to the Diffusers class `class_name`.

    The list has one message, or is empty if it can be exported.
    """
    if model.glyph_hidden_size == GLYPH_HIDDEN:
        return []
    return [
        f"model.glyph_hidden_size={model.glyph_hidden_size} cannot be exported: {GLYPH_HIDDEN} is"
        f" fixed in Diffusers' {class_name}. Train with model.glyph_hidden_size={GLYPH_HIDDEN} to"
        " export"
    ]


def text_inputs(model: HasGlyphs, text_LE: Tensor, glyph_GE: Tensor | None) -> dict[str, Tensor]:
    """The arguments of Diffusers' network for a caption and for ByT5's states of quoted words.

    `glyph_GE` is None for a caption without quoted words.
    """
    if glyph_GE is None:
        glyph_GE = text_LE.new_zeros(0, model.glyph_embed_size)
    return {
        "encoder_hidden_states": text_LE[None],
        "encoder_attention_mask": text_LE.new_ones(1, len(text_LE)),
        "encoder_hidden_states_2": glyph_GE[None],
        "encoder_attention_mask_2": text_LE.new_ones(1, len(glyph_GE)),
    }
