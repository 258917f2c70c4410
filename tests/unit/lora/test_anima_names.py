"""Adapters of Anima in the names of other tools, as Diffusers reads them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_anima_lora_to_diffusers
from diffusers.modular_pipelines.anima.modular_blocks_anima import AnimaAutoBlocks
from safetensors.torch import save_file

from dit.lora.factors import LoraFileError, linear_shapes
from dit.lora.files import read_lora, write_lora
from dit.lora.names import to_original
from dit.models.dit.diffusers import PREDICT2_NAMES
from dit.models.dit.family import TextConditioner
from tests.families.anima import random_conditioner
from tests.families.dit import NETWORKS, random_model
from tests.lora_files import comfyui, kohya, linears, merged, model_of, random_factors

ANIMA = NETWORKS["images"]
_tiny = model_of(random_model(**ANIMA), pipeline="AnimaModularPipeline")


def test_files_of_diffusion_pipe_and_kohya(tmp_path: Path) -> None:
    factors = random_factors(linears(random_model(**ANIMA)))
    names = to_original(factors, PREDICT2_NAMES)
    assert names is not None
    flat, plain = kohya(factors, names), comfyui(factors, names, alphas=False)
    theirs = _convert_non_diffusers_anima_lora_to_diffusers(dict(plain))
    for content in (plain, flat):
        save_file(content, tmp_path / "other.safetensors")
        found = read_lora(tmp_path / "other.safetensors", _tiny)
        assert found.keys() == factors.keys()
        for name, one in found.items():
            down, up = (theirs[f"transformer.{name}.lora_{part}.weight"] for part in "AB")
            scale = 1.0 if content is plain else 8 / len(down)  # alphas are kohya's alone
            torch.testing.assert_close(one.product(), scale * (up @ down))


def test_the_conditioner_has_adapters_where_it_is_a_part(tmp_path: Path) -> None:
    """In all forms; a network without it refuses them by name."""
    conditioner, ids = random_conditioner(), torch.arange(9)[None]
    shapes = {f"text_conditioner.{name}": size for name, size in linears(conditioner).items()}
    sizes: Any = {"crossattn_emb_size": 16, "crossattn_proj_size": 20, "conditioner_size": 24}
    sizes |= {"conditioner_layers": 2, "conditioner_heads": 2, "conditioner_vocabulary": 700}
    model = replace(_tiny, text_conditioner=TextConditioner.TRAINED, **sizes)
    shapes |= linears(random_model(**ANIMA))
    assert linear_shapes(model) == shapes
    factors = random_factors(shapes, ranks={"attn.q_proj": 2, "in_proj": 3})
    write_lora(tmp_path, factors, comfyui_names=PREDICT2_NAMES)
    names = to_original(factors, PREDICT2_NAMES)
    assert names is not None
    for number, content in enumerate((comfyui(factors, names, alphas=True), kohya(factors, names))):
        save_file(content, tmp_path / f"{number}.safetensors")
        with pytest.raises(LoraFileError, match=r"llm_adapter.* set model.text_conditioner=trai"):
            read_lora(tmp_path / f"{number}.safetensors", _tiny)
    own = ("pytorch_lora_weights", "adapter_model", "comfyui/lora")
    for file in (*own, "0", "1"):
        found = read_lora(tmp_path / f"{file}.safetensors", model)
        assert found.keys() == factors.keys(), file
        for name, one in found.items():
            torch.testing.assert_close(one.product(), factors[name].product(), msg=file)
    its = {n.removeprefix("text_conditioner."): one for n, one in factors.items() if n[:2] == "te"}
    told: Any = {"source_hidden_states": torch.ones(1, 5, 16), "target_input_ids": ids}
    wanted = merged(random_conditioner(), its)(**told)
    for file in (tmp_path, tmp_path / "comfyui" / "lora.safetensors"):
        pipe: Any = AnimaAutoBlocks().init_pipeline()
        network = random_model(**ANIMA)
        pipe.update_components(transformer=network, text_conditioner=random_conditioner())
        pipe.load_lora_weights(str(file))
        made = pipe.text_conditioner(**told)
        assert (made - wanted).abs().max() <= 1e-5 * wanted.abs().max()
