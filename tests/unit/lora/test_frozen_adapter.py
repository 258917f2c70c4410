"""Adapters of a file beside those that are trained: on in training, in none of its results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dit.checkpoint_paths import CheckpointError
from dit.config import LoraConfig, MockGeometry, ObjectiveConfig, Precision, RunConfig
from dit.config_loading import load_config
from dit.convert.megatron_checkpoint import StoredWeights
from dit.lora.adapter import AdapterShape
from dit.lora.factors import LoraFactors, LoraFileError, linear_shapes
from dit.lora.files import write_lora
from dit.lora.frozen import frozen_adapter
from dit.lora.targets import attach_adapters, chosen_adapters
from dit.models.layer_spec import TOKENS
from dit.models.layers.adaptable import (
    CHILD,
    FROZEN,
    DropoutRows,
    TokenPlaces,
    adapters_off,
    dropping,
    is_up,
)
from dit.objectives.registry import training_objective
from dit.objectives.training_target import training_problem
from dit.sizing.memory import weight_bytes
from dit.train.model_and_optimizer import build_model_and_optimizer, randomise
from dit.train.reference_passes import reference_passes
from dit.train.trainer import measure_steps, pretrain
from dit.train.validation import validate
from tests.learning import tiny_run
from tests.lora_files import random_factors
from tests.packs import random_pack

Factors = Mapping[str, LoraFactors]


def a_config(**lora: Any) -> RunConfig:
    mixture = (MockGeometry(height=8, width=8, text_length=3, weight=1.0),)
    data = {"mock_samples": mixture, "task_encoder_seq_length": 64, "packing_buffer_size": 4}
    config = replace(tiny_run(num_layers=1), lora=LoraConfig(**lora))
    return replace(config, dataset=replace(config.dataset, num_workers=0, **data))


def some_factors(seed: int = 3) -> dict[str, LoraFactors]:
    """Of every second linear, in another rank than the trained ones, and with an alpha."""
    shapes = linear_shapes(tiny_run(num_layers=1).model)
    return random_factors(dict([*shapes.items()][::2]), seed=seed)


def scaled(factors: Factors, by: float) -> dict[str, LoraFactors]:
    return {name: replace(one, up=one.up * by) for name, one in factors.items()}


def written(folder: Path, factors: Factors) -> str:
    folder.mkdir()
    write_lora(folder, factors)
    return str(folder)


def steps_of(config: RunConfig, steps: int = 2) -> list[tuple[float, float]]:
    """Losses and norms of gradients from random weights, and adapters that are nothing."""

    def fill(model: Any) -> None:
        randomise(model, seed=2)
        for name, parameter in model.named_parameters():
            if is_up(name):
                parameter.data.zero_()

    done = measure_steps(config, warm_up=0, steps=steps, around=nullcontext(), fill=fill)
    return [(values["loss"], values["grad_norm"]) for values in done]


def test_one_that_is_nothing_changes_no_bit_and_a_negative_takes_one_back(groups, tmp_path):
    factors = some_factors()
    nothing = written(tmp_path / "nothing", scaled(factors, 0))
    file, negative = (written(tmp_path / str(by), scaled(factors, by)) for by in (1, -1))
    alone = steps_of(a_config(rank=3))
    assert steps_of(a_config(rank=3, frozen_adapter=nothing)) == alone
    ((beside, _),) = steps_of(a_config(rank=3, frozen_adapter=file), 1)
    assert abs(beside - alone[0][0]) > 1e-3 * alone[0][0]
    ((back, _),) = steps_of(a_config(init_from=negative, frozen_adapter=file), 1)
    assert back == pytest.approx(alone[0][0], rel=1e-6)


def a_network(groups: Any) -> Any:
    """Of a run with both kinds, all of them random."""
    config = a_config(rank=3)
    kinds = (chosen_adapters(config.model, LoraConfig(rank=rank)) for rank in (3, 2))
    adapters, frozen = kinds
    model = build_model_and_optimizer(
        config,
        groups,
        fill=partial(randomise, seed=2),
        adapters=adapters,
        frozen=frozen,
    )
    return config, model


def test_passes_without_gradient_and_validation_have_it_and_pictures_do_not(groups):
    config, model = a_network(groups)
    (chunk,) = model.chunks
    objective = ObjectiveConfig(name="flow", drift_weight=0.5, cfg_target=2.0, text_dropout=0.0)
    config = replace(config, objective=objective)
    run: Any = SimpleNamespace(
        config=config,
        model=model,
        objective=training_objective(objective),
        null={"text": torch.full((3, 8), 0.7)},
    )
    pack = random_pack([(1, 4, 4), (2, 3, 3)], [5, 2], model=config.model)
    told: Any = {"seed": 1, "step": 4, "null": run.null, "options": objective}
    item = training_problem(run.objective, pack, **told)
    found = reference_passes(run, [pack], [item], step=4)
    assert found is not None

    def said(names: list[str] | None) -> torch.Tensor:
        with torch.no_grad(), adapters_off(chunk, names):
            return chunk.module(item[1].input_TC, item[1].level_M, item[0])

    real = item[0].is_target_T
    assert torch.equal(found.unadapted_TC[0][real], said(None)[real])
    every = [said(names)[real] for names in ([], [CHILD], [FROZEN], [CHILD, FROZEN])]
    assert torch.equal(every[1], said(None)[real])
    assert all(not torch.allclose(a, b) for n, a in enumerate(every) for b in every[:n])

    def loss() -> float:
        return validate(model, [pack], objective=run.objective, config=config)["val_loss"]

    with adapters_off(chunk, [FROZEN]):
        without = loss()
    assert abs(loss() - without) > 1e-3 * without
    assert not [name for name, p in chunk.named_parameters() if FROZEN in name and p.requires_grad]


def test_each_adapter_of_a_linear_drops_numbers_of_its_own(groups):
    """Two trained ones and a frozen one add up, each as it is alone; equal ones differ by that."""
    _, model = a_network(groups)
    network: Any = model.modules[0]
    name = next(iter(chosen_adapters(network.model, LoraConfig(rank=1))))
    second = {name: AdapterShape(rank=2, alpha=1.0)}
    attach_adapters(
        network, second, precision=Precision.FP32, dropout=0.5, adapter=f"{CHILD}_second"
    )
    randomise(network, seed=4)
    (linear,) = [m for m in network.modules() if len(getattr(m, "beside", ())) == 2]
    linear.lora.dropout = 0.5
    every = [FROZEN, f"{CHILD}_second", CHILD]
    assert [*linear.adapters()] == every
    assert [p.requires_grad for one in every for p in linear.adapters()[one].parameters()] == (
        [False] * 2 * len(linear.adapters()[FROZEN].factors)
        + [True] * (2 + 2 * len(linear.lora.factors))
    )
    x = torch.randn(9, linear.weight.shape[1])
    rows = TokenPlaces(whole_T=torch.arange(9), own_T=torch.arange(9))
    dropped = DropoutRows(seed=5, places={linear.token_row or TOKENS: rows})

    def added(*on: str) -> torch.Tensor:
        with dropping(dropped), adapters_off(linear, [one for one in every if one not in on]):
            return linear(x) - bare

    bare = torch.zeros(())
    bare = added()
    apart = [added(one) for one in every]
    torch.testing.assert_close(added(*every), sum(apart), rtol=1e-4, atol=1e-5)
    linear.lora.dropout = 0.0
    assert not torch.allclose(added(CHILD), apart[2])
    linear.adapters()[FROZEN].dropout = 0.0
    assert torch.equal(added(FROZEN), apart[0])
    equal: Any = linear.adapters()[f"{CHILD}_second"]
    linear.lora = copy(equal)
    linear.lora.name = linear.adapters()[FROZEN].name.removesuffix(f".{FROZEN}")
    assert not torch.allclose(added(CHILD), added(f"{CHILD}_second"))
    linear.lora.name = equal.name
    assert torch.equal(added(CHILD), added(f"{CHILD}_second"))


def a_run(folder: Path, *more: str) -> RunConfig:
    keys = (
        *("train.train_iters=4", "train.global_batch_size=1", "train.eval_interval=2"),
        *("train.eval_iters=1", "checkpoint.save_interval=2", "lora.rank=3"),
        *("lora.ignore_text_encoder=true", f"checkpoint.save={folder}"),
        *("objective.preference=dpo", "dataset.task_encoder_seq_length=128"),
    )
    return load_config(a_config(), overrides=[*keys, *more])


def test_a_run_goes_on_beside_the_same_file_alone(groups, tmp_path):
    """Bit for bit, and from another place and form of it; what is learned is from pairs."""
    factors, whole, again = some_factors(), tmp_path / "whole", tmp_path / "again"
    file = written(tmp_path / "file", factors)
    other = written(tmp_path / "other", some_factors(seed=8))
    seen: list[set[tuple[str, bool]]] = []

    def samples(_: Any) -> Any:
        def drawn(run: Any, model: Any) -> None:
            found = (m.adapters() for m in run.model.modules[0].modules() if hasattr(m, "adapters"))
            seen.append({(name, one.enabled) for of in found for name, one in of.items()})

        return drawn

    config = a_run(whole, f"lora.frozen_adapter={file}")
    assert pretrain(config, open_samples=samples) == 0
    assert seen and all(one == {(CHILD, True), (FROZEN, False)} for one in seen)
    last = whole / "checkpoints/step_00000004"
    stored = StoredWeights(last, averaged=False)
    assert all(".lora." in name for name in stored._tensors())
    assert json.loads((last / "lora.json").read_text())["frozen"]["path"] == file
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints/step_00000004")
    (again / "checkpoints/LATEST").write_text("step_00000002")
    for keys, error, said in (
        ([f"lora.frozen_adapter={other}"], CheckpointError, f"lora.frozen_adapter={file}"),
        ([], CheckpointError, f"lora.frozen_adapter={file}"),
        ([f"lora.frozen_adapter={tmp_path}/none"], LoraFileError, f"{tmp_path}/none does not"),
    ):
        with pytest.raises(error, match=said):
            pretrain(a_run(again, *keys))
    keys = {f"{k}.{n}": t for k, one in factors.items() for n, t in named(one)}
    save_file(
        keys | {"text_encoder.q_proj.lora_A.weight": torch.ones(2, 2)}, tmp_path / "f.safetensors"
    )
    pretrain(a_run(again, f"lora.frozen_adapter={tmp_path}/f.safetensors"))
    two = StoredWeights(again / "checkpoints/step_00000004", averaged=False)
    for name in stored._tensors():
        assert torch.equal(stored.read_whole(name), two.read_whole(name))
    # What a new run starts from its adapters may have another one, or none.
    load = (f"checkpoint.load={again}", "checkpoint.finetune=true")
    pretrain(a_run(tmp_path / "new", *load, f"lora.frozen_adapter={other}"))
    with pytest.raises(CheckpointError, match=r"lora\.frozen_adapter=null"):
        plain = tmp_path / "plain"
        pretrain(a_run(plain))
        pretrain(a_run(plain, "train.train_iters=5", f"lora.frozen_adapter={file}"))


def named(one: LoraFactors) -> list[tuple[str, torch.Tensor]]:
    """Alpha folded, as one of our exports has it."""
    folded = one.folded()
    alpha = torch.tensor(folded.alpha)
    return [("lora_A.weight", folded.down), ("lora_B.weight", folded.up), ("alpha", alpha)]


def test_a_file_of_another_network_is_named(tmp_path):
    file = written(tmp_path / "file", some_factors())
    config = replace(tiny_run(hidden_size=96, num_layers=1), lora=LoraConfig(rank=2))
    config = replace(config, lora=replace(config.lora, frozen_adapter=file))
    with pytest.raises(LoraFileError, match=f"^lora.frozen_adapter={file} is of another network"):
        frozen_adapter(config, None)
    with pytest.raises(ValueError, match="rank=null trains all weights; set rank"):
        LoraConfig(frozen_adapter=file)


def test_the_estimate_counts_what_a_file_holds(tmp_path):
    """Or rank 32 where it is not here."""
    factors = random_factors(linear_shapes(tiny_run(num_layers=1).model), ranks={"": 64})
    file = written(tmp_path / "file", factors)
    held = 4 * sum(one.down.numel() + one.up.numel() for one in factors.values())

    def estimate(**lora: Any) -> int:
        return weight_bytes(a_config(**lora))

    of_one = estimate(rank=1) - estimate()
    for beside, alone in (("frozen_adapter", {"rank": 2}), ("init_from", {})):
        assert held <= estimate(**alone, **{beside: file}) - estimate(**alone) < held + of_one
        unread = estimate(**alone, **{beside: "none"}) - estimate(**alone)
        assert unread == 32 * of_one > 0
