"""Parameter counts against Diffusers' own model, and what the memory estimate must obey."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dit.config import (
    BaseType,
    ContextComm,
    DatasetConfig,
    DdpConfig,
    EmaConfig,
    EmaKind,
    LoraConfig,
    MockGeometry,
    Precision,
    Recompute,
    RecomputeMethod,
    TrainConfig,
)
from dit.config_loading import load_config
from dit.models.dit.family import DitConfig, ExtraPosition
from dit.models.wan.family import WanConfig
from dit.sizing.describe import describe
from dit.sizing.memory import inventory_of, memory, parameter_count
from tests.packs import run_config

COUNTS = {
    "dit_s": 49_302_912,
    "dit_b": 149_327_616,
    "dit_l": 483_269_632,
    "dit_xl": 691_725_312,
    "cosmos_7b": 7_236_192_256,
    "cosmos_14b": 14_267_149_312,
    "cosmos_predict2_2b": 1_956_405_248,
    "anima": 1_956_405_248,
    "cosmos_predict2_14b": 14_265_265_152,
    "cosmos_predict2_2b_video2world": 1_956_413_440,
    "cosmos_predict2_14b_video2world": 14_265_285_632,
    "cosmos_predict2.5_2b": 2_059_174_912,
    "cosmos_predict2.5_14b": 14_368_047_104,
}


def counted_by_diffusers(model: DitConfig) -> int:
    import torch
    from diffusers.models.transformers.transformer_cosmos import CosmosTransformer3DModel

    learnable = model.extra_pos_embed is ExtraPosition.LEARNABLE
    projected = model.crossattn_proj_size is not None
    with torch.device("meta"):
        network = CosmosTransformer3DModel(
            in_channels=model.in_channels + model.condition_mask,
            out_channels=model.in_channels,
            num_attention_heads=model.num_attention_heads,
            attention_head_dim=model.hidden_size // model.num_attention_heads,
            num_layers=model.num_layers,
            mlp_ratio=model.mlp_ratio,
            text_embed_dim=model.text_width,
            use_crossattn_projection=projected,
            crossattn_proj_in_channels=model.crossattn_emb_size,
            encoder_hidden_states_channels=model.text_width,
            adaln_lora_dim=model.adaln_lora_dim,
            max_size=model.max_size,
            patch_size=(model.patch_temporal, model.patch_spatial, model.patch_spatial),
            rope_scale=model.rope_scale,
            concat_padding_mask=model.concat_padding_mask,
            extra_pos_embed_type="learnable" if learnable else None,
        )
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_named_sizes_have_exactly_these_parameters(name: str, count: int) -> None:
    model = load_config(run_config(), overrides=[f"model.name={name}"]).model
    assert parameter_count(model) == count
    assert counted_by_diffusers(model) == count


@pytest.mark.parametrize(
    "changes",
    [
        {"in_channels": 4, "patch_spatial": 1, "crossattn_emb_size": 64},
        {"patch_temporal": 2, "mlp_ratio": 2.5, "adaln_lora_dim": 8},
        {"concat_padding_mask": True},
        {
            "extra_pos_embed": ExtraPosition.LEARNABLE,
            "max_size": (9, 30, 22),
            "patch_temporal": 2,
            "concat_padding_mask": True,
        },
    ],
)
def test_the_formula_holds_for_any_geometry(changes: dict) -> None:
    model = DitConfig(name="custom", num_layers=3, hidden_size=96, num_attention_heads=4, **changes)
    assert parameter_count(model) == counted_by_diffusers(model)


def test_memory_of_weights_gradients_and_optimizer() -> None:
    config = run_config()
    count = parameter_count(config.model)
    one = memory(config, world_size=1)
    assert (one.weights, one.gradients) == (2 * count, 4 * count)
    assert (one.optimizer, one.ema) == (12 * count, 4 * count)
    eight = memory(config, world_size=8)
    assert (eight.weights, eight.gradients) == (one.weights, one.gradients)
    assert (eight.optimizer, eight.ema) == (one.optimizer // 8, one.ema // 8)
    whole = replace(config, ddp=DdpConfig(use_distributed_optimizer=False))
    assert memory(whole, world_size=8).optimizer == one.optimizer
    wide = replace(config, model=replace(config.model, precision=Precision.FP32))
    assert memory(wide, world_size=1).optimizer == 8 * count
    assert memory(replace(config, ema=EmaConfig(kind=EmaKind.NONE)), world_size=1).ema == 0


def test_memory_of_a_frozen_base() -> None:
    """8 bits a number of matrices, and of the factor of a row; N blocks fewer."""
    model = WanConfig(name="wan2.1_t2v_14b", **WanConfig.sizes["wan2.1_t2v_14b"])
    config = replace(run_config(), model=model, lora=LoraConfig(rank=32))
    whole = memory(config, world_size=1).weights
    numbers, rows = inventory_of(model).layer_matrices()
    width, wide = 5120, 13824
    assert numbers == 4 * width**2 + 4 * width**2 + 2 * width * wide
    assert rows == 4 * width + 4 * width + wide + width
    narrow = replace(config, lora=replace(config.lora, base_dtype=BaseType.FLOAT8_E4M3))
    assert memory(narrow, world_size=1).weights == whole - 40 * (numbers - rows)
    swapped = replace(model, blocks_to_swap=30)
    away = memory(replace(config, model=swapped), world_size=1)
    assert away.weights == whole - 30 * 2 * numbers
    both = memory(replace(narrow, model=swapped), world_size=1)
    assert both.weights == memory(narrow, world_size=1).weights - 30 * numbers
    assert "matrices of layers in float8_e4m3" in describe(narrow, world_size=1)


def test_recomputation_and_shorter_packs_need_less() -> None:
    config = run_config()
    full = replace(config, model=replace(config.model, recompute_granularity=Recompute.FULL))
    assert memory(full, world_size=1).activations < memory(config, world_size=1).activations / 10
    by_block = replace(full.model, recompute_method=RecomputeMethod.BLOCK, recompute_num_layers=14)
    half = memory(replace(config, model=by_block), world_size=1).activations
    # A layer that is recomputed keeps its input.
    numbers = config.dataset.task_encoder_seq_length * config.model.hidden_size
    whole = memory(config, world_size=1).activations
    assert half == pytest.approx(whole / 2 + 14 * 2 * numbers, rel=1e-6)
    short = replace(config, dataset=replace(config.dataset, task_encoder_seq_length=1536))
    tenth = memory(config, world_size=1).activations / 10
    assert memory(short, world_size=1).activations == pytest.approx(tenth, rel=1e-6)


def test_each_context_rank_keeps_all_texts() -> None:
    def kept(context: int, rows: int) -> int:
        layout = {"context_parallel_size": context, "cp_comm_type": ContextComm.P2P}
        mixture = (MockGeometry(height=64, width=64, text_length=rows),)
        data = DatasetConfig(mock=True, mock_samples=mixture, task_encoder_seq_length=4096)
        config = run_config(model=DitConfig(**layout), dataset=data)
        return memory(config, world_size=context).activations

    whole, shared = ([kept(ranks, rows) for rows in (256, 512)] for ranks in (1, 4))
    # Of four captions in 28 layers: keys and values as they are made, keys as the norm reads and
    # as it makes them.
    texts = 28 * 4 * 256 * 4 * 1152 * 2
    assert whole[1] - whole[0] == shared[1] - shared[0] == texts
    ring = 28 * 4096 * 2 * 1152 * 2  # keys and values that arrived last, of all ranks' tokens
    # Three ranks more hold rows of modulation.
    rows = 4 * (shared[0] - texts) - (whole[0] - texts) - ring
    assert 0 < rows < 0.003 * whole[0]


def test_description_is_a_configuration_again(tmp_path) -> None:
    config = load_config(
        run_config(), overrides=["optimizer.weight_decay=0.1", "train.train_iters=500"]
    )
    text = describe(config, world_size=4)
    (tmp_path / "run.yaml").write_text(text)
    assert load_config(run_config(), config_file=tmp_path / "run.yaml") == config
    for part in (
        "691,725,312 trainable (dit_xl)",
        "4 processes = tensor 1 x context 1 x pipeline 1 x data 4",
        "8 packs a step = 4 data-parallel ranks x 2 accumulated",
        "an estimate",
        "0.1 on matrices",
        "at step 500 (train.train_iters)",
        "matrix products bf16",
    ):
        assert part in text


def test_a_description_for_a_layout_that_cannot_be_is_an_error() -> None:
    config = run_config(train=TrainConfig(global_batch_size=6))
    with pytest.raises(ValueError, match="use a multiple of 4"):
        describe(config, world_size=4)
