"""What FLUX.2 alone has: positions of four axes, a told scale, words for adapters."""

from __future__ import annotations

import torch
from diffusers.models.transformers.transformer_flux2 import Flux2PosEmbed
from diffusers.pipelines.flux2.pipeline_flux2 import Flux2Pipeline

from dit.config import LoraConfig
from dit.lora.targets import chosen_adapters
from dit.models.flux2.model import Flux2Network
from dit.models.linears import matrices_of_linears
from dit.models.positions import TimeOffsetPositions
from dit.models.registry import family_named
from dit.sizing.inventory import alone, inventory
from dit.train.model_and_optimizer import initialise_weights
from tests.packs import run_config

FAMILY = family_named("flux2")
SHORT = {"name": "custom", "num_layers": 2, "num_single_layers": 1}
MODEL = FAMILY.config(**{**FAMILY.sizes["flux2_dev"], **FAMILY.tiny["flux2_dev"], **SHORT})


def test_positions_and_angles_are_those_of_the_pipeline(groups) -> None:
    """Of a picture of 3 x 40, references of 2 x 2 and 1 x 1000, and a text of 512 tokens."""
    latents = [torch.zeros(1, 8, *size) for size in ((3, 40), (2, 2), (1, 1000))]
    ids = [Flux2Pipeline._prepare_latent_ids(latents[0])]
    ids.append(Flux2Pipeline._prepare_image_ids(latents[1:]))
    grids = tuple((1, *x.shape[2:]) for x in latents)
    found = TimeOffsetPositions()(grids, fps=float("nan"))
    assert torch.equal(found, torch.cat(ids, dim=1)[0].float())
    text = Flux2Pipeline._prepare_text_ids(torch.zeros(2, 512, 4)).float()
    assert torch.equal(TimeOffsetPositions.of_text([512, 512]), text.flatten(0, 1))
    assert TimeOffsetPositions.of_text([0, 0]).shape == (0, 4)
    place = torch.cat([found, text[0]])
    theirs = Flux2PosEmbed(theta=2000, axes_dim=[2, 4, 4, 2])(place)
    network = Flux2Network(MODEL, groups)
    for ours, wanted in zip(network.rotary(place), theirs, strict=True):
        # Neighbours turn together there, and halves of a head here.
        torch.testing.assert_close(ours[:, :6], wanted[:, ::2], rtol=0, atol=2e-7)


def test_layers_start_as_the_identity(groups) -> None:
    network = Flux2Network(MODEL, groups)
    initialise_weights(network, run_config(model=MODEL))
    for name, weight in network.named_parameters():
        zero = name.startswith("modulations") or name == "proj_out.weight"
        assert weight.any() == (not zero), name


def test_words_of_adapters_mean_the_linears_of_both_kinds_of_layers() -> None:
    found = {
        word: {*chosen_adapters(MODEL, LoraConfig(rank=2, targets=(word,)))}
        for word in ("attention", "mlp", "single_stream_modulation.linear")
    }
    double, single = ("transformer_blocks.0", "transformer_blocks.1"), "single_transformer_blocks.0"
    own = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")
    fused = f"{single}.attn.to_qkv_mlp_proj"
    names = (*own, "to_add_out")
    assert found["attention"] == {fused, *(f"{d}.attn.{name}" for d in double for name in names)}
    linears = (f"{ff}.linear_{n}" for ff in ("ff", "ff_context") for n in ("in", "out"))
    mlp = {f"{d}.{name}" for name in linears for d in double}
    assert found["mlp"] == {fused, f"{single}.attn.to_out", *mlp}
    assert len(found["single_stream_modulation.linear"]) == 1
    matrices = matrices_of_linears(MODEL)
    sides = {name: sum(s) for pair in matrices for name, s in pair.their_shapes.items()}
    adapted = found["attention"] | found["mlp"]
    planned = inventory(alone(MODEL)).adapter_numbers(2)
    assert planned == 2 * sum(sides[f"{name}.weight"] for name in adapted)
