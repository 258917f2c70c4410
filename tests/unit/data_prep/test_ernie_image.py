"""Texts and latents of ERNIE-Image are its pipeline's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.pipelines.ernie_image.pipeline_ernie_image import ErnieImagePipeline
from transformers import AutoTokenizer, Mistral3Model

from tests.families import encoding, ernie_image

CAPTIONS = ["a red bird on a roof", "", "x" * 1200]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ernie_image.encoders(tmp_path_factory.mktemp("ernie_image"))


def test_texts_are_those_of_the_pipeline(folder: Path) -> None:
    """Of the caption alone, as long as it is; an empty one has a token, too."""
    ours = encoding.encoder("ernie_image", folder)
    assert (ours.width, ours.max_length) == (16, 1024)
    network = Mistral3Model.from_pretrained(folder, subfolder="text_encoder").eval()
    letters = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer")
    letters.model_max_length = 1024
    pipe = ErnieImagePipeline(None, None, network, letters, None)  # type: ignore[arg-type]
    for caption in CAPTIONS:
        (rows,) = pipe.encode_prompt(caption, torch.device("cpu"))
        own = ours.encode(caption)
        assert torch.equal(own, rows.bfloat16()) and len(own)
        assert torch.equal(ours.encode_negative(caption)["text"], own)
        assert ours.is_cut(caption) == (caption == CAPTIONS[2])
    encoding.check_card(ours)


def test_latents_decode_as_in_the_pipeline(folder: Path) -> None:
    """The pipeline adds 1e-5 to variances, whatever config.json of the VAE says."""
    vae = AutoencoderKLFlux2.from_pretrained(folder, subfolder="vae")
    model = encoding.codec("ernie_image", folder)
    cells = torch.randn(1, 16, 5, 7, generator=torch.Generator().manual_seed(0))
    pipe = ErnieImagePipeline(None, vae, None, None, None)  # type: ignore[arg-type]
    mean, variance = vae.bn.running_mean, vae.bn.running_var
    plain = cells * (variance + 1e-5).sqrt()[:, None, None] + mean[:, None, None]
    with torch.no_grad():
        wanted = vae.decode(pipe._unpatchify_latents(plain)).sample[0]
    found = model.decode_raw(model.whitening.undo(cells.transpose(0, 1)))
    assert (found[:, 0] - wanted).abs().max() < 1e-5
    undone = model.whitening.undo(cells.transpose(0, 1))[:, 0]
    torch.testing.assert_close(undone, plain[0], rtol=1e-6, atol=1e-6)
    assert not model.edits_pictures and vae.config.batch_norm_eps == 1e-4
