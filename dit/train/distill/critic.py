"""Initial weights of DMD's critic: those of `distill.critic_load`, or the teacher's.

1. fill_of_critic  fills a new critic: all its weights, or only its adapters
2. check_critic    checks `distill.critic_load` in the same way for a dry run
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from dit.checkpoint_paths import CheckpointError, find_checkpoint, verify
from dit.config import ModelConfig, RunConfig
from dit.distributed.collective_errors import from_first_rank
from dit.lora.checkpoint import adapters_of, factors_of_file
from dit.lora.factors import LoraFactors, shapes_of
from dit.lora.targets import Adapters
from dit.models.stacks.stacked_transformer import StackedTransformer
from dit.train.checkpoint.adapters import AdapterStart, draw_adapters, initialise_adapters
from dit.train.checkpoint.state_dict import load_weights
from dit.train.checkpoint.without_tensors import CRITIC, check_same_weights, has_critic
from dit.train.distill.teacher import check_place, frozen_run, start_at
from dit.train.model_and_optimizer import Initialise
from dit.train.train_state import ReadFolder


def fill_of_critic(
    config: RunConfig, student: AdapterStart | None, read_folder: ReadFolder | None
) -> Initialise:
    """The function that fills a new critic; all ranks call it.

    The critic has adapters if the student, whose start is `student`, has them.

    Raises:
        ValueError: `distill.critic_load` holds no weights that fit.
    """
    place, key = config.distill.critic_load, "critic_load"
    trained = None if student is None else student.run.adapters
    if place is None:
        if trained is not None:
            return partial(initialise_adapters, seed=config.rng.seed)
        place, key = config.distill.teacher, "teacher"
        assert place is not None, "RunConfig asks for a teacher where all weights are trained"
    elif (path := from_first_rank(lambda: critic_at(place, config.model, trained))) is not None:
        return partial(_from_checkpoint, path=path)
    elif trained is not None:
        factors = from_first_rank(lambda: critic_adapters(config, trained))
        return partial(_draw, factors=factors)
    start = start_at(place, config, read_folder, key=key)
    return partial(_from_start, start=start, model=frozen_run(config).model)


def critic_at(place: str, model: ModelConfig, trained: Adapters | None) -> Path | None:
    """The checkpoint at `place` if it holds a critic, else None; reads no tensors.

    `trained` are the student's adapters, or None.

    Raises:
        CheckpointError: the critic belongs to another network, or to other adapters.
    """
    path = find_checkpoint(Path(place))
    if path is None or not has_critic(path):
        return None
    check_same_weights(path, model)
    saved = adapters_of(path)
    if (None if saved is None else saved.adapters) != trained:
        raise _other_adapters(place)
    return path


def critic_adapters(config: RunConfig, trained: Adapters) -> dict[str, LoraFactors]:
    """The critic's adapters in the file or folder `distill.critic_load`.

    Raises:
        LoraFileError: the file cannot be read, or belongs to another network.
        CheckpointError: the adapters differ in names or ranks from the student's, `trained`.
    """
    place = config.distill.critic_load
    factors = factors_of_file(config.lora, config.model, place=place, key="distill.critic_load")
    if shapes_of(factors) != trained:
        raise _other_adapters(place)
    return factors


def check_critic(
    config: RunConfig, trained: Adapters | None, read_folder: ReadFolder | None
) -> None:
    """Checks `distill.critic_load` as `fill_of_critic` does, but on one process, for a dry run.

    Raises:
        ValueError: `distill.critic_load` holds no weights that fit.
    """
    place = config.distill.critic_load
    if place is None or critic_at(place, config.model, trained) is not None:
        return
    if trained is not None:
        critic_adapters(config, trained)
    else:
        check_place(place, config, read_folder, key="critic_load")


def _other_adapters(place: str | None) -> CheckpointError:
    return CheckpointError(
        f"distill.critic_load={place} holds other adapters than those that the student trains; the"
        " critic's must be in the same linear layers, with equal ranks and alphas. Name such"
        " adapters, or leave distill.critic_load out"
    )


def _draw(module: StackedTransformer, factors: dict[str, LoraFactors]) -> None:
    draw_adapters(module, factors, copies=module.groups.dp_cp)


def _from_checkpoint(module: StackedTransformer, path: Path) -> None:
    verify(path)
    load_weights(path, [module], module.groups, averaged=False, among=CRITIC)


def _from_start(module: StackedTransformer, start: AdapterStart, model: ModelConfig) -> None:
    start.load_base([module], model, module.groups)
