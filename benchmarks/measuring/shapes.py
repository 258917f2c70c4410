"""Networks and packs that the planner, `benchmark.py --shape` and `make gpu` share."""

from __future__ import annotations

from collections.abc import Mapping

SIZES = ("full", "tiny")
"""Sizes of networks; `tiny` tries the code on a CPU, and its figures mean nothing."""

_PACKS = {
    "full": "dataset.task_encoder_seq_length=32768 dataset.packing_buffer_size=64"
    " dataset.num_workers=2 model.precision=bf16",
    "tiny": "dataset.task_encoder_seq_length=256 dataset.packing_buffer_size=16"
    " dataset.num_workers=0 model.precision=fp32",
}
_ALWAYS = "dataset.mock=true dataset.sample_multiple=16 train.global_batch_size=1"
_SMALL = "name=custom num_layers=1 hidden_size=48 num_attention_heads=4 crossattn_emb_size=16"
_WAN, _FLUX = "name=custom family=wan", "name=custom family=flux guidance_embed=false"
_XL = ("name=dit_xl crossattn_emb_size=1024", f"{_SMALL} adaln_lora_dim=8")
_7B = "num_layers=6 hidden_size=4096 num_attention_heads=32"  # of 28 layers: so many fit
_WAN_14B = "num_layers=4 hidden_size=5120 num_attention_heads=40 mlp_ratio=2.7"  # of 40
_FLUX_1 = "num_layers=2 num_single_layers=4 hidden_size=3072 num_attention_heads=24"  # of 19 + 38
_FLUX_TINY = f"{_SMALL} {_FLUX} num_single_layers=1 rope_axes=[4,4,4]"
_PICTURE_256 = ((1, 32, 32, 256), (1, 8, 8, 8))
_TIGHT = ((1, 64, 64, 128), (1, 16, 16, 8))  # 1,024 and 64 tokens
SHAPES: Mapping[str, tuple[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "xl": (_XL, _TIGHT),
    # One sample of 32,760 tokens: 81 frames of 480 x 832 pixels.
    "wan14b": (
        (f"{_WAN} {_WAN_14B} crossattn_emb_size=4096", f"{_SMALL} {_WAN} text_pad_to=12"),
        ((21, 60, 104, 512), (3, 8, 8, 8)),
    ),
    # Seven samples of 4,096 image tokens, each with 512 of text in the same attention.
    "flux": ((f"{_FLUX} {_FLUX_1}", _FLUX_TINY), ((1, 128, 128, 512), (1, 8, 8, 8))),
    # MLPerf Training's FLUX.1: a picture of 256 pixels and its text have 256 tokens each.
    "flux-512": ((f"{_FLUX} {_FLUX_1}", _FLUX_TINY), _PICTURE_256),
    "flux-512-whole": (("name=flux1_schnell family=flux", _FLUX_TINY), _PICTURE_256),
    # All layers of FLUX.1 for adapters: frozen weights have neither gradients nor moments.
    "flux12b": (("name=flux1_dev family=flux", _FLUX_TINY), ((1, 128, 128, 512), (1, 8, 8, 8))),
    "7b": (
        (f"name=custom {_7B} adaln_lora_dim=256 crossattn_emb_size=1024", _XL[1]),
        _TIGHT,
    ),
    "xl-padded": (_XL, ((1, 62, 66, 128), (1, 14, 18, 8))),  # one token fewer
}
"""(overrides of the network, samples) by name of the shape. Both have an entry for each of SIZES; a
sample is (frames, height, width, text length), in latent cells and tokens."""
WHOLE = {"flux-512": "flux-512-whole"}
"""The shape of the whole network, for a shape with few of its layers. A whole network is too large
to train on one device: its rates are computed."""


def shape_keys(shape: str, size: str = SIZES[0]) -> list[str]:
    """The overrides for the network and the packs of `shape` in the size `size`.

    Raises:
        ValueError: no shape has this name.
    """
    if shape not in SHAPES:
        raise ValueError(f"no shape is named {shape}; choose one of {', '.join(SHAPES)}")
    networks, samples = SHAPES[shape]
    which = SIZES.index(size)
    names = ("frames", "height", "width", "text_length")
    sample = ", ".join(f"{n}: {v}" for n, v in zip(names, samples[which], strict=True))
    keys = [*_ALWAYS.split(), *_PACKS[size].split(), f"dataset.mock_samples=[{{{sample}}}]"]
    return [*keys, *(f"model.{key}" for key in networks[which].split())]
