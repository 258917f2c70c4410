"""The attention kernel of a run (`model.attention_backend`), the same on all ranks.

1. A named kernel that does not fit, or does not work, on any rank ends the run with the reason.
2. With `auto`, a resumed run keeps the kernel of its checkpoint if it works on all ranks.
3. Otherwise the first rank times the kernels that work, unless kernels must be deterministic. The
   choice is stored in the configuration of checkpoints.

Kernels round differently, so ranks that share a layer, and a resumed run, must use the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import torch

from dit.checkpoint_paths import saved_config
from dit.config import AttentionBackend, DatasetConfig, ModelConfig, RunConfig
from dit.distributed.collective_errors import from_first_rank, on_all_ranks
from dit.distributed.process_groups import device
from dit.distributed.watchdog import heartbeat
from dit.models.attention.choice import BUDGET_S, attention_calls, fault, milliseconds
from dit.models.attention.fit import AttentionCase, fitting, refusal
from dit.models.attention.kernels import shapes_of_runs
from dit.models.registry import network_spec
from dit.parsing import cause
from dit.sizing.passes import length_shares

_MOST_TOKENS = 32_768
"""Largest pack that is timed, in tokens; attention over more takes seconds a layer."""
_MOST_SHAPES = 4
"""SDPA is timed only if its calls for a pack have at most this many shapes. On Hopper torch uses
cuDNN, which builds a graph for each shape, and each sample size in a pack has its own shape."""


def with_attention(
    config: RunConfig, *, timed: bool, continued: Path | None = None
) -> tuple[RunConfig, list[str]]:
    """Chooses the attention kernel; returns the configuration with it, and log lines about it.

    All ranks call it. A named kernel is only checked. `auto` becomes one kernel that works on all
    ranks; where only one kernel fits, as on CPUs and in float32, `auto` stays. If `timed` is false,
    the kernel is the one that is usually fastest. `continued` is the checkpoint from which the run
    resumes, whose kernel is kept if it works.

    Raises:
        ValueError: the named kernel cannot be used on this machine.
    """
    heartbeat("choice of the attention kernel")
    samples = from_first_rank(lambda: usual_pack(config) if _capability() else [])
    case = AttentionCase.of(config, _capability())
    if config.model.attention_backend is not AttentionBackend.AUTO:
        _refuse(
            config.model, next(filter(None, on_all_ranks(lambda: _reason(config.model, case))), "")
        )
        return config, []
    ranks = on_all_ranks(lambda: {one: _fault(one, case) for one in fitting(case)})
    working = [one for one in fitting(case) if all(rank.get(one) == "" for rank in ranks)]
    notes = list(_without(ranks, working))
    if all(len(rank) == 1 for rank in ranks):
        return config, notes  # CPUs, or float32: the choice is left to the next machine
    before = from_first_rank(lambda: _before(continued))
    if before in working:
        return _with(config, before), notes
    *fused, last = working
    chosen, times = (fused or [last])[0], ""
    candidates = working if few_shapes(config.model, config.dataset, samples) else fused
    if timed and not case.deterministic and len(candidates) > 1:
        chosen, times = from_first_rank(lambda: _fastest(config.model, candidates, samples))
    gone = before is not AttentionBackend.AUTO
    why = f"{times}{gone * f'; {before}, as in the checkpoint, cannot be used here'}"
    return _with(config, chosen), [*notes, f"attention by {chosen}{why}"]


def usual_pack(config: RunConfig) -> list[tuple[int, int]]:
    """(latent tokens, text tokens) of each sample of a typical pack, sorted.

    The pack has at most `_MOST_TOKENS` tokens, and at most as many as the run's packs. Latent
    tokens are drawn from the sizes in the data, or from `dataset.mock_samples` if these are
    unknown; text tokens are those of `dataset.mock_samples`. In a network with joint attention the
    sizes in the data include the text tokens, which are subtracted.
    """
    mock, joint = config.dataset.mock_samples, network_spec(config.model).attends_jointly
    sizes = [(config.mock_tokens(one), one.text_length) for one in mock]
    weights = [one.weight for one in mock]
    if shares := length_shares(config):
        text = mock[0].text_length
        sizes, weights = [(max(1, n - joint * text), text) for n in shares], [*shares.values()]
    room = min(config.dataset.task_encoder_seq_length, _MOST_TOKENS)
    random, taken = Random(0), list[tuple[int, int]]()
    while True:
        tokens, text = random.choices(sizes, weights)[0]
        filled = tokens + joint * text
        if filled > room:
            return sorted(taken) or [(room, text)]  # the loader sorts the samples of a pack, too
        taken.append((tokens, text))
        room -= filled


def few_shapes(
    model: ModelConfig, dataset: DatasetConfig, samples: Sequence[tuple[int, int]]
) -> bool:
    """Whether SDPA calls for a pack of `samples` have at most `_MOST_SHAPES` shapes.

    Unless the data are mock data, the shapes must also stay the same if each text has one token
    more.
    """
    packs = [samples]
    if not dataset.mock:
        packs.append([(tokens, text + 1) for tokens, text in samples])
    first, *others = (
        {
            shape
            for call in attention_calls(model, pack, device=torch.device("cpu"))
            for shape in shapes_of_runs(call.spans)
        }
        for pack in packs
    )
    return len(first) <= _MOST_SHAPES and all(shapes == first for shapes in others)


def _capability() -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device()) if torch.cuda.is_available() else None


def check_named(config: RunConfig) -> None:
    """Checks that the kernel `model.attention_backend` works on this machine for any pack.

    Raises:
        ValueError: the kernel does not fit or does not work.
    """
    _refuse(config.model, _reason(config.model, AttentionCase.of(config, _capability())))


def _reason(model: ModelConfig, case: AttentionCase) -> str:
    named = model.attention_backend
    return refusal(named, case) or _fault(named, case)


def _refuse(model: ModelConfig, reason: str) -> None:
    if reason:
        raise ValueError(
            f"model.attention_backend={model.attention_backend} cannot be used: {reason};"
            " set model.attention_backend=auto, or name another kernel"
        )


def _fault(backend: AttentionBackend, case: AttentionCase) -> str:
    """Reason why `backend` does not work on this rank; empty if it does."""
    if backend is AttentionBackend.SDPA:
        return ""
    return fault(backend, case.head_width, device())


def _without(
    ranks: Sequence[dict[AttentionBackend, str]], working: Sequence[AttentionBackend]
) -> Iterator[str]:
    """Log lines about kernels that fit but do not work on all `ranks`."""
    some = dict.fromkeys(one for rank in ranks for one in rank if one not in working)
    for one in some:
        if one is not AttentionBackend.SDPA:
            faults = (rank.get(one, "not all ranks have it") for rank in ranks)
            yield f"attention without {one}, which does not work: {next(filter(None, faults))}"


def _before(continued: Path | None) -> AttentionBackend:
    if continued is None:
        return AttentionBackend.AUTO
    return saved_config(continued).model.attention_backend


def _fastest(
    model: ModelConfig, backends: Sequence[AttentionBackend], samples: list[tuple[int, int]]
) -> tuple[AttentionBackend, str]:
    """The fastest of `backends` for a pack of `samples`, and a phrase with the times of all."""
    calls = attention_calls(model, samples, device=device())
    budget, times, failed = BUDGET_S / len(backends), {}, ""
    for one in backends:
        heartbeat(f"timing of {one}")
        try:
            times[one] = milliseconds(one, calls, budget_s=budget)
        except Exception as error:  # noqa: BLE001  # packages raise errors of many types
            failed += f"; {one} fails: {cause(error)}"
    if device().type == "cuda":
        torch.cuda.empty_cache()
    ranked = sorted(times, key=lambda one: times[one]) or [backends[-1]]
    said = ", ".join(f"{one} {times[one]:.3g}" for one in ranked if one in times)
    return ranked[0], f" (ms a pack in all layers: {said}{failed})"


def _with(config: RunConfig, backend: AttentionBackend) -> RunConfig:
    return replace(config, model=replace(config.model, attention_backend=backend))
