"""Everything wrong is one error that names key, value, place and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from dit.config import OptimizerConfig, Problems, RunConfig, TrainConfig
from dit.config_loading import ConfigError, load_config
from dit.models.dit.family import DitConfig
from tests.packs import run_config
from tests.tables import table


def problems_of(*tokens: str, file: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(run_config(), config_file=file, overrides=tokens)
    return caught.value.problems


def only_problem(*tokens: str) -> str:
    (problem,) = problems_of(*tokens)
    return problem


@pytest.mark.parametrize(("key", "guess"), table(__file__, "nearest"))
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


@pytest.mark.parametrize(("token", "expected"), table(__file__, "types"))
def test_a_wrong_type_says_what_is_expected(token: str, expected: str) -> None:
    message = only_problem(token)
    assert "(command line): expected " in message
    assert f"expected {expected}" in message
    assert message.startswith(token.partition("=")[0])


@pytest.mark.parametrize(("token", "expected"), table(__file__, "combinations"))
def test_an_impossible_combination_names_its_numbers(token: str, expected: str) -> None:
    message = only_problem(token)
    assert message.startswith(expected)
    if "mock_samples" not in token:
        assert "from command line" in message


@pytest.mark.parametrize("never", ["train.eval_interval=0", "train.eval_iters=0"])
def test_a_target_without_validation_is_never_reached(never: str) -> None:
    message = only_problem("validation.target=0.5", never)
    assert message.startswith("validation.target=0.5 is a validation loss, and")
    assert f"{never} " in message and "never validates; set both above 0" in message


@pytest.mark.parametrize(
    ("geometry", "expected"),
    [
        ("{width: 65}", "does not divide into patches of model.patch_temporal=1"),
        ("{frames: 100}", "needs 102400 tokens of model.family=dit, more than dataset.task_encod"),
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


def test_a_mock_sample_has_sides_that_its_network_takes() -> None:
    """Of Qwen-Image-2.1 they are multiples of 32 pixels, two cells of 16."""
    samples = "dataset.mock_samples=[{height: 4, width: 6}, {height: 4, width: 5}]"
    message = only_problem("dataset.mock=true", samples, "model.name=qwen_image21")
    assert message.startswith("dataset.mock_samples[1]: ")
    assert "model.family=qwen_image21 takes heights and widths that are multiples of 2" in message


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
        "nonsense (command line): is not an override",
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
    # The tokens of the file's mock samples depend on a network that is not judged.
    file = Path(__file__).resolve().parents[3] / "conf/hidream_debug.yaml"
    assert len(problems_of("model.llama_states=0", file=file)) == 1


@pytest.mark.parametrize("value", table(__file__, "resolvers"))
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
    assert message.startswith(f"{file}:1: the tag !!python/object/apply:os.mkdir is not supported")
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


@pytest.mark.parametrize(("tokens", "expected"), table(__file__, "no_overrides"))
def test_what_is_no_override(tokens: list[str], expected: str) -> None:
    assert only_problem(*tokens).startswith(expected)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"train: [1, 2", ":1: "),
        (b"train:\n  train_iters: 1\n  train_iters: 2\n", ":3: found duplicate key train_iters"),
        (b"- 1\n- 2\n", ": must be a mapping"),
        (b"just text", ": must be a mapping"),
        (b"\xff\xfe\x00", ": the text is not in UTF-8"),
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
        f"{tmp_path / 'none.yaml'}: cannot be read (No such file or directory; check the path);"
        " check --config-file"
    )
    assert len(found) == 2


def test_a_global_batch_that_does_not_divide() -> None:
    config = run_config(train=TrainConfig(global_batch_size=6))
    assert config.data_parallel_size(3) == 3
    with pytest.raises(Problems, match="global_batch_size=6 packs do not divide over 4"):
        config.data_parallel_size(4)


@pytest.mark.parametrize(("split", "problem", "remedy"), table(__file__, "layouts"))
def test_what_does_not_divide_over_ranks_names_what_would(
    split: list[str], problem: str, remedy: str
) -> None:
    message = problems_of(*split)[0]
    assert problem in message and remedy in message


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
    with pytest.raises(Problems, match="is not a known size"):
        DitConfig(name="dit_huge")
    with pytest.raises(Problems) as caught:
        OptimizerConfig(lr=-1.0, adam_beta1=2.0, adam_eps=0.0)
    # Negative lr also leaves no room for min_lr.
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(("wrong", "remedy"), table(__file__, "samples"))
def test_samples_that_cannot_be_say_what_would_do(wrong: str, remedy: str) -> None:
    message = only_problem(wrong)
    assert message.startswith("validation") and remedy in message
    assert wrong.removeprefix("validation.").split("=")[0] in message


@pytest.mark.parametrize("asked", ["prompts_file=prompts.txt", "negative_prompt=blurred"])
def test_prompts_need_a_text_encoder(asked: str) -> None:
    message = only_problem(f"validation.{asked}", "dataset.mock=true")
    assert f"validation.{asked}" in message
    assert "use validation.num_captions instead" in message
