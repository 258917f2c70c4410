"""Everything wrong is one error that names key, value, place and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from dit.config import OptimizerConfig, Problems, RunConfig, TrainConfig
from dit.config_loading import ConfigError, load_config
from dit.models.dit.family import DitConfig
from tests.packs import run_config


def problems_of(*tokens: str, file: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(run_config(), config_file=file, overrides=tokens)
    return caught.value.problems


def only_problem(*tokens: str) -> str:
    (problem,) = problems_of(*tokens)
    return problem


@pytest.mark.parametrize(
    ("key", "guess"),
    [
        ("model.num_layer", "model.num_layers"),
        ("modle.num_layers", "model.num_layers"),
        ("train_iters", "train.train_iters"),
        ("train.lr", "optimizer.lr"),
        ("train.iters", "train.train_iters"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("dataset.save", "checkpoint.save"),
        ("optimizer.weight_decy", "optimizer.weight_decay"),
        ("modle", "model"),
        ("dataset.mock_samples.0.widht", "dataset.mock_samples.0.width"),
    ],
)
def test_an_unknown_key_names_its_nearest(key: str, guess: str) -> None:
    message = only_problem(f"{key}=3")
    assert message == f"{key}=3 (command line): unknown key; did you mean {guess}?"


def test_an_unknown_key_in_a_file_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train:\n  train_iters: 3\n  trian_iters: 4\n")
    (message,) = problems_of(file=file)
    assert message == (
        f"train.trian_iters=4 ({file}:3): unknown key; did you mean train.train_iters?"
    )


def test_unknown_keys_inside_a_list_are_found(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("dataset:\n  mock_samples:\n  - {width: 64}\n  - {heigth: 64}\n")
    (message,) = problems_of(file=file)
    assert message.startswith(f"dataset.mock_samples.1.heigth=64 ({file}:2): unknown key")
    assert "did you mean dataset.mock_samples.1.height?" in message


def test_unknown_keys_can_be_removed_neither() -> None:
    assert only_problem("~model.num_layer").startswith("~model.num_layer (command line): unknown")


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("train.train_iters=abc", "an integer"),
        ("train.train_iters=1.5", "an integer"),
        ("train.train_iters=1e4", "an integer; write 10000"),
        ("train.train_iters='5'", "an integer"),
        ("train.train_iters=true", "an integer"),
        ("train.train_iters=null", "an integer"),
        ("train.train_iters={a: 1}", "an integer"),
        ("dataset.mock='true'", "true or false"),
        ("dataset.mock=1", "true or false"),
        ("optimizer.lr=fast", "a number"),
        ("optimizer.lr=true", "a number"),
        ("logger.wandb_project=5", "text or null; put it in quotes"),
        ("logger.wandb_project=no", "text or null; put it in quotes"),
        ("model.precision=fp16", "one of fp32, bf16; did you mean bf16?"),
        ("model.recompute_granularity=null", "one of none, selective, full"),
        ("model.rope_scale=[1,2]", "a list of 3 values, each a number"),
        ("model.rope_scale=[1,2,3,4]", "a list of 3 values, each a number"),
        ("model.rope_scale=2", "a list of 3 values, each a number"),
        ("model.virtual_pipeline_model_parallel_size=two", "an integer or null"),
        ("dataset.mock_samples=[3]", "keys of frames, height, width"),
        ("dataset.mock_samples={width: 3}", "a list of {frames, height, width"),
        ("lora.targets=attention", "a list of texts; write [attention]"),
        ("lora.targets=attention,mlp", "a list of texts; write [attention,mlp]"),
        ("objective.given_frames=1", "a list of numbers or null; write [1]"),
        ("dataset.blend=[{weight: 1}]", "keys of path, weight; path is missing"),
    ],
)
def test_a_wrong_type_says_what_is_expected(token: str, expected: str) -> None:
    message = only_problem(token)
    assert "(command line): expected " in message
    assert f"expected {expected}" in message
    assert message.startswith(token.partition("=")[0])


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("model.hidden_size=100", "model: hidden_size=100 does not divide into"),
        ("model.num_attention_heads=0", "model: num_attention_heads=0 must be at least 1"),
        ("model.name=dit_m", "model: name=dit_m is no known size; use dit_s, dit_b, dit_l, dit_xl"),
        ("model.sequence_parallel=true", "model: sequence_parallel=true needs"),
        ("model.context_parallel_size=3", "model: cp_comm_type=a2a spreads num_attention_heads=16"),
        (
            "model.virtual_pipeline_model_parallel_size=2",
            "model: virtual_pipeline_model_parallel_size=2 needs",
        ),
        ("model.pipeline_model_parallel_size=3", "model: num_layers=28 does not divide by"),
        ("train.micro_batch_size=2", "train: micro_batch_size=2 must be 1"),
        ("dataset.task_encoder_seq_length=8", "dataset: task_encoder_seq_length=8 must be a pos"),
        ("optimizer.adam_eps=.nan", "optimizer: adam_eps=nan must be positive"),
        ("scheduler.lr_decay_iters=0", "scheduler: lr_decay_iters=0 must be at least 1"),
        ("scheduler.lr_warmup_iters=10000", "scheduler.lr_warmup_iters=10000 must lie below"),
        ("rng.seed=-1", "rng: seed=-1 must not be negative"),
        ("objective.mode_scale=2", "objective: mode_scale=2.0 must lie in [-1.0, 1.7519]: beyond"),
        ("objective.timestep_scale=0", "objective: timestep_scale=0.0 must be positive"),
        ("dataset.mock_samples=[{width: 0}]", "dataset.mock_samples[0]: width=0 must be at least"),
    ],
)
def test_an_impossible_combination_names_its_numbers(token: str, expected: str) -> None:
    message = only_problem(token)
    assert message.startswith(expected)
    if "mock_samples" not in token:
        assert "from command line" in message


@pytest.mark.parametrize(
    ("geometry", "expected"),
    [
        ("{width: 65}", "does not divide into patches of model.patch_temporal=1"),
        ("{frames: 100}", "needs 102400 tokens, more than dataset.task_encoder_seq_length=15360"),
        ("{width: 242, height: 2}", "exceeds the largest latent of the network, (128, 240, 240)"),
    ],
)
def test_a_mock_sample_that_fits_no_pack_is_refused(geometry: str, expected: str) -> None:
    message = only_problem(
        "dataset.mock=true",
        f"dataset.mock_samples=[{{}}, {geometry}]",
        "model.extra_pos_embed=learnable",
    )
    assert message.startswith("dataset.mock_samples[1]: ")
    assert expected in message


@pytest.mark.parametrize(
    ("tokens", "remedy"),
    [
        (["train.train_iters=15"], "(train.train_iters); set scheduler.lr_warmup_iters=1, or more"),
        (["scheduler.lr_decay_iters=9"], "(scheduler.lr_decay_iters); set scheduler.lr_warmup_it"),
    ],
)
def test_fewer_steps_than_the_warm_up_names_what_fits(tokens: list[str], remedy: str) -> None:
    message = only_problem("scheduler.lr_warmup_iters=20", *tokens)
    assert remedy in message
    fits = message.partition("set ")[2].partition(",")[0]
    load_config(run_config(), overrides=["scheduler.lr_warmup_iters=20", *tokens, fits])


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {hidden_size: 100, num_layer: 2, mlp_ratio: wide}\nrng: {seed: -1}\n")
    found = problems_of(
        "train.train_iters=many",
        "train.micro_batch_size=2",
        "scheduler.lr_warmup_iters=1e5",
        "nonsense",
        "checkpoint.keep_last=-1",
        "dataset.path=${oc.nope:1}",
        file=file,
    )
    expected = (
        "nonsense (command line): is no override",
        "model.num_layer=2",
        'dataset.path="${oc.nope:1}"',
        'model.mlp_ratio="wide"',
        'train.train_iters="many"',
        "scheduler.lr_warmup_iters=100000.0",
        "rng: seed=-1",
        "checkpoint: keep_last=-1",
        "model: hidden_size=100",
        "train: micro_batch_size=2",
    )
    for start in expected:
        assert sum(problem.startswith(start) for problem in found) == 1, start
    assert len(found) == len(expected)


def test_the_message_has_one_line_a_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(run_config(), overrides=["rng.sed=1", "rng.seed=-1"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "2 problems in the configuration:"
    assert [line[:4] for line in lines[1:]] == ["  - ", "  - "]


def test_problems_between_groups_are_found_behind_wrong_types() -> None:
    found = problems_of("optimizer.lr=fast", "scheduler.lr_warmup_iters=99999")
    assert [problem.split("=")[0] for problem in found] == [
        "optimizer.lr",
        "scheduler.lr_warmup_iters",
    ]


def test_what_may_follow_from_a_wrong_value_is_not_reported() -> None:
    # 384 does not divide by the recipe's 16 heads, but the file meant 6.
    assert len(problems_of("model.hidden_size=390", "model.num_attention_heads='6'")) == 1


@pytest.mark.parametrize(
    "value",
    [
        "${oc.create:x}",
        "${oc.decode:${oc.env:HOME}}",
        "${oc.select:rng.seed}",
        "${oc.deprecated:rng.seed}",
        "${eval:1+1}",
        "${python:os.getcwd}",
        "${${rng.seed}:x}",
        "a ${hydra:run.dir} b",
        r"\\${eval:1}",
        r"${oc.env:NOT_SET,\${eval:1}}",
        r'${oc.env:NOT_SET,"\\${eval:1}"}',
    ],
)
def test_no_other_resolver_runs(value: str) -> None:
    assert "is not supported; use ${other.key} or" in only_problem(f"dataset.path='{value}'")


def test_an_unfinished_interpolation(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("dataset: {path: '${rng.seed'}\n")
    (in_file,) = problems_of(file=file)
    typed = only_problem("dataset.path='${rng.seed'")
    for message, place in ((in_file, f"{file}:1"), (typed, "command line")):
        assert message.startswith(f'dataset.path="${{rng.seed" ({place}): ${{rng.seed is not supp')


def test_no_value_names_code(tmp_path: Path) -> None:
    message = only_problem("model._target_=os.system")
    assert "no value names code to run" in message
    file = tmp_path / "run.yaml"
    file.write_text("model: {_target_: os.system, _args_: [ls]}\n")
    assert len(problems_of(file=file)) == 2
    proof = tmp_path / "ran"
    file.write_text(f"dataset: {{path: !!python/object/apply:os.mkdir ['{proof}']}}\n")
    (message,) = problems_of(file=file)
    assert message.startswith(f"{file}:1: could not determine a constructor")
    assert not proof.exists()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("${nope.key}", "Interpolation key 'nope.key' not found"),
        ("${oc.env:CERTAINLY_NOT_SET}", "Environment variable 'CERTAINLY_NOT_SET' not found"),
        ("${dataset.path}", "Recursive"),
        ("???", "must be given"),
    ],
)
def test_an_interpolation_that_leads_nowhere(value: str, why: str) -> None:
    message = only_problem(f"dataset.path='{value}'")
    assert message.startswith(f'dataset.path="{value}" (command line): ')
    assert why in message


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["--rng.seed"], "--rng.seed (command line): has no value; write --rng.seed=VALUE"),
        (["--dataset.mock", "--rng.seed=3"], "--dataset.mock (command line): has no value"),
        (["rng.seed"], "rng.seed (command line): is no override; write KEY=VALUE"),
        (["=3"], "=3 (command line): is no override"),
        (
            ["a/run.yaml"],
            "a/run.yaml (command line): is no override; write --config-file a/run.yaml",
        ),
        (["~rng.seed=3"], "~rng.seed=3 (command line): ~KEY takes no value; write ~rng.seed"),
        (["rng.seed=["], "rng.seed=[ (command line): "),
        (["model=3"], "model=3 (command line): is a group and holds no value; set a key such as"),
        (["model=null"], "model=null (command line): is a group and holds no value"),
        (["dataset.mock_samples.4.width=3"], "dataset.mock_samples.4.width=3 (command line): "),
    ],
)
def test_what_is_no_override(tokens: list[str], expected: str) -> None:
    assert only_problem(*tokens).startswith(expected)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"train: [1, 2", ":1: "),
        (b"train:\n  train_iters: 1\n  train_iters: 2\n", ":3: found duplicate key train_iters"),
        (b"- 1\n- 2\n", ": must be a mapping"),
        (b"just text", ": must be a mapping"),
        (b"\xff\xfe\x00", ": is no text in UTF-8"),
        (b"a: &a {b: *a}\n", ":1: "),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes, expected: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    (message,) = problems_of(file=file)
    assert message.startswith(f"{file}{expected}")


def test_a_missing_file_is_named_beside_other_problems(tmp_path: Path) -> None:
    found = problems_of("rng.sed=1", file=tmp_path / "none.yaml")
    assert found[0] == (
        f"{tmp_path / 'none.yaml'}: cannot be read (No such file or directory); check --config-file"
    )
    assert len(found) == 2


def test_a_global_batch_that_does_not_divide() -> None:
    config = run_config(train=TrainConfig(global_batch_size=6))
    assert config.data_parallel_size(3) == 3
    with pytest.raises(Problems, match="global_batch_size=6 packs do not divide over 4"):
        config.data_parallel_size(4)


def test_heads_that_do_not_divide_over_tensor_ranks() -> None:
    split = ("model.hidden_size=96", "model.num_attention_heads=6")
    (message, *_) = problems_of(*split, "model.tensor_model_parallel_size=4")
    assert "num_attention_heads=6 does not divide by tensor_model_parallel_size=4" in message
    assert "choose a divisor of 6" in message


def test_samples_that_do_not_divide_over_context_ranks() -> None:
    split = ("model.context_parallel_size=3", "model.cp_comm_type=all_gather")
    message = only_problem(*split)
    assert "dataset.sample_multiple=16 does not divide by it" in message
    assert "use dataset.sample_multiple=48" in message


def test_ring_of_context_ranks_takes_two_pieces_of_a_sample() -> None:
    split = ("model.context_parallel_size=16", "model.cp_comm_type=p2p")
    message = only_problem(*split)
    assert "dataset.sample_multiple=16 does not divide by 32, for cp_comm_type=p2p" in message
    assert "use dataset.sample_multiple=32" in message


def test_no_ring_of_context_ranks_is_deterministic() -> None:
    split = ("model.context_parallel_size=2", "model.cp_comm_type=p2p")
    message = only_problem(*split, "train.deterministic=true")
    assert "no kernel for model.cp_comm_type=p2p" in message
    assert "use cp_comm_type=a2a or all_gather" in message


def test_heads_that_do_not_divide_over_context_ranks_name_the_choice_that_fits() -> None:
    split = ("model.tensor_model_parallel_size=2", "model.context_parallel_size=16")
    message = only_problem(*split)
    assert "* context_parallel_size=16 = 32 ranks" in message
    assert "use cp_comm_type=all_gather" in message


def test_packs_that_do_not_fill_virtual_stages() -> None:
    stages = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    config = RunConfig(model=DitConfig(**stages), train=TrainConfig(global_batch_size=6))
    assert config.data_parallel_size(2) == 1
    with pytest.raises(Problems, match=r"are 3 each.* use a multiple of 4"):
        config.data_parallel_size(4)


def test_too_few_processes_for_the_layout() -> None:
    model = DitConfig(tensor_model_parallel_size=4)
    config = RunConfig(model=model, train=TrainConfig(global_batch_size=6))
    assert config.data_parallel_size(8) == 2
    with pytest.raises(Problems, match=r"2 processes do not divide by .* = 4; start a multiple of"):
        config.data_parallel_size(2)


def test_the_dataclasses_check_themselves() -> None:
    with pytest.raises(Problems, match="is no known size"):
        DitConfig(name="dit_huge")
    with pytest.raises(Problems) as caught:
        OptimizerConfig(lr=-1.0, adam_beta1=2.0, adam_eps=0.0)
    # Negative lr also leaves no room for min_lr.
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ("validation.sampling_steps=0", "must lie in [1, 1000]; 35 is usual"),
        ("validation.num_captions=-1", "must lie in [0, 1024]; 8 make a readable grid"),
        ("validation.guidance=.inf", "must be a finite number; 1 is without guidance"),
        ("validation.fps=0", "must be positive and finite; 24 is usual"),
        ("validation.sample_seed=-1", "must not be negative; take any integer from 0"),
        ("validation.height=0", "must be at least 1"),
        ("validation.sampler=ddim", "heun"),
    ],
)
def test_samples_that_cannot_be_say_what_would_do(wrong: str, remedy: str) -> None:
    message = only_problem(wrong)
    assert message.startswith("validation") and remedy in message
    assert wrong.removeprefix("validation.").split("=")[0] in message


@pytest.mark.parametrize("asked", ["prompts_file=prompts.txt", "negative_prompt=blurred"])
def test_prompts_need_a_text_encoder(asked: str) -> None:
    message = only_problem(f"validation.{asked}", "dataset.mock=true")
    assert f"validation.{asked}" in message
    assert "use validation.num_captions instead" in message
