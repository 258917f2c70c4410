"""The DiT with sound, on one process: samples are independent, what a sample lacks adds nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dit.batch import LATENTS, SOUND, NoisyTokens
from dit.config import LossMean
from dit.models.sound_dit.model import SoundDit
from dit.train.model_and_optimizer import randomise
from tests.learning import assert_equal, weights_and_averages
from tests.packs import run_config
from tests.resuming import STEPS, built, resumed, saved, step
from tests.sounding import FLOW, ROUTED, Mixed, assert_each_as_alone, sound_model, trained
from tests.toy_networks import RECOMPUTED


def network_of(groups, **changes):
    network = SoundDit(sound_model(**changes), groups)
    randomise(network, seed=7)
    return network.train()


WAYS = [(mean, {}) for mean in LossMean] + [(LossMean.TOKEN, ROUTED)]


@pytest.mark.parametrize(("mean", "changes"), WAYS)
def test_each_of_six_mixed_samples_is_as_alone(groups, mean, changes) -> None:
    """Also where layers see a part of the frames, and all of the sound."""
    assert_each_as_alone(network_of(groups, **changes), replace(FLOW, loss_mean=mean))


def test_a_sample_without_sound_gets_nothing_of_it(groups) -> None:
    """To the bit as in a network whose streams do not meet, with the same weights."""
    model = sound_model()
    network, apart = network_of(groups), network_of(groups, streams_meet=False)
    with torch.no_grad():
        for name, weight in apart.named_parameters():  # modulations have one slot less
            weight.copy_(network.get_parameter(name)[: len(weight)])
    silent = Mixed(model, [1, 5])
    batch, problem = silent.on_one_rank()
    with torch.no_grad():
        fed = problem.input_TC, problem.level_M, batch
        assert torch.equal(network(*fed)[LATENTS], apart(*fed)[LATENTS])
    _, gradients, _ = trained(network, silent)
    assert set(gradients) == {n for n, _ in network.named_parameters()}
    assert not gradients["sound_in.weight"].any() and gradients["patches.weight"].any()


@pytest.mark.parametrize("moved", ["sound", "level", "time"])
def test_frames_hear_their_own_sound_alone(groups, moved) -> None:
    network, mixed = network_of(groups), Mixed(sound_model())
    batch, problem = mixed.on_one_rank()
    sound = batch.others[SOUND]
    fed = sound.method(NoisyTokens)
    rows = slice(0, sound.num_tokens[0])
    input_TC, level_M, position_TA = (
        x.clone() for x in (fed.input_TC, fed.level_M, sound.position_TA)
    )
    if moved == "sound":
        input_TC[rows] += 1
    elif moved == "level":
        level_M[0] += 100
    else:
        position_TA[rows] += 3  # which its own attention, of differences alone, does not see
    changed = replace(sound, position_TA=position_TA).with_method(
        NoisyTokens(input_TC=input_TC, level_M=level_M)
    )
    with torch.no_grad():
        before = network(problem.input_TC, problem.level_M, batch)[LATENTS]
        other = replace(batch, others={SOUND: changed})
        after = network(problem.input_TC, problem.level_M, other)[LATENTS]
    spans = zip(batch.starts, batch.num_tokens, strict=False)
    first, *others = [(before[s : s + n] - after[s : s + n]).abs().max() for s, n in spans]
    assert first > 1e-4 and not any(others)


def test_a_pack_of_given_frames_alone_trains(groups) -> None:
    _, gradients, loss = trained(network_of(groups), mixed := Mixed(sound_model(), [2]))
    assert int(loss.count) == mixed.batch.latent_tokens[0] and loss.total > 0
    assert gradients["decoder.layers.0.from_video.linear_kv.weight"].any()


@pytest.mark.parametrize(
    "changes",
    [*RECOMPUTED, {"cpu_offloading_num_layers": 1}],
    ids=["full", "groups", "block", "selective", "offload"],
)
def test_recomputation_and_offload_change_no_bit(groups, changes) -> None:
    mixed = Mixed(sound_model())
    _, plain, _ = trained(network_of(groups), mixed)
    _, found, _ = trained(network_of(groups, **changes), mixed)
    assert all(torch.equal(found[name], gradient) for name, gradient in plain.items())


def test_a_resumed_run_goes_on_with_the_same_draws_to_the_bit(groups, tmp_path) -> None:
    objective = replace(FLOW, video_given=0.3, sound_given=0.3, sound_prefix=0.5)
    config = run_config(model=sound_model(), objective=objective)
    straight = built(config, groups)
    for number in range(1, STEPS + 1):
        step(straight, config, number)
    place = saved(tmp_path, straight, config)
    step(straight, config, STEPS + 1)
    going_on = resumed(place, config, groups)
    step(going_on, config, STEPS + 1)
    assert_equal(weights_and_averages(going_on), weights_and_averages(straight))
