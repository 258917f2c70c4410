"""Compares a packed step of Qwen-Image-2.1 with plain loops over Diffusers' network.

1. samples   random pictures of one size with captions of several lengths, packed; the loops get the
             same samples, noise and levels
2. ours      one pass over the packs
   alone     Diffusers' network, one call a sample without padding, one backward pass a batch
   padded    one call a batch, captions padded and masked: as its network takes one layout for a
             batch, pictures after shorter captions get wrong positions
3. losses    of the first step: ours and `alone` agree, `padded` computes something else

    python benchmarks/compare_block_causal.py --steps 5

Any key of a run may follow (model.num_layers=8 model.precision=bf16 ...). One process.
"""

# B samples of a batch, L text tokens, E text width, n tokens of a picture, C numbers in a token

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from dit.command_line import OptionParser
from dit.config import EmaKind, MockGeometry, ObjectiveName, RunConfig
from dit.config_loading import load_config
from dit.console import Console
from dit.distributed.entry import run
from dit.models.registry import family_named

OURS, ALONE, PADDED = "packed, ours", "one call a sample", "padded captions"
SMALL = [
    *("model.family=qwen_image21", "model.name=custom", "model.num_layers=2"),
    *("model.hidden_size=256", "model.num_attention_heads=4", "model.crossattn_emb_size=256"),
    *("model.rope_axes=[16,24,24]", "model.precision=fp32"),
]
"""Overrides for a network that two cores train in seconds."""
LENGTHS = (8, 64, 24, 40)
"""Number of text rows of each caption in a batch."""
AGREE = 1e-5


def main(argv: Sequence[str] | None = None) -> int:
    compare(argv)
    return 0


def compare(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Compares the methods as the options in `argv` say, and prints a table.

    Returns {"losses": loss of the first step by method, "tokens_per_s": median rate by method}.
    With --json the same dict is written to a file.

    Raises:
        ValueError: the losses contradict `check_losses`.
    """
    options, overrides = _parser().parse_known_args(argv)
    config = load_config(_base(options), config_file=None, overrides=[*SMALL, *overrides])
    ways, tokens = _ways(config, options.batches)
    losses = {name: step() for name, step in ways.items()}  # warm-up as well
    check_losses(losses)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.steps):
        for name, step in ways.items():
            began = time.process_time() if options.cpu_seconds else time.perf_counter()
            step()
            ended = time.process_time() if options.cpu_seconds else time.perf_counter()
            seconds[name].append(ended - began)
    rates = {name: tokens / median(taken) for name, taken in seconds.items() if taken}
    found = {"losses": losses, "tokens_per_s": rates}
    table = Table(title="First loss, and real tokens a second", title_justify="left")
    for heading in ("way", "loss", "tokens / s"):
        table.add_column(heading, justify="right")
    for name, loss in losses.items():
        table.add_row(name, f"{loss:.7f}", f"{rates[name]:,.0f}" if name in rates else "")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


def check_losses(losses: dict[str, float]) -> None:
    """Checks that the packed loss equals that of single samples, and differs from the padded one.

    Raises:
        ValueError: the losses contradict this.
    """
    ours, alone, padded = (losses[name] for name in (OURS, ALONE, PADDED))
    if not abs(ours - alone) <= AGREE * abs(alone):
        raise ValueError(
            f"the first step's loss is {ours:.8g} packed and {alone:.8g} sample by sample: the two"
            " do not compute the same; set model.precision=fp32, or find the first layer whose"
            " outputs differ"
        )
    if abs(padded - alone) <= AGREE * abs(alone):
        raise ValueError(
            f"the first step's loss is {padded:.8g} with padded captions, as without padding:"
            " pictures kept their positions; set LENGTHS to captions of several lengths"
        )


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="timed ones (%(default)s)")
    parser.add_argument("--batches", type=int, default=2, help="of four samples (%(default)s)")
    parser.add_argument("--side", type=int, default=16, help="of pictures, in cells (%(default)s)")
    parser.add_argument("--cpu-seconds", action="store_true", help="of this process")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    return parser


def _base(options: argparse.Namespace) -> RunConfig:
    side, longest = options.side, max(LENGTHS)
    base = RunConfig(model=family_named("qwen_image21").default())
    sample = MockGeometry(height=side, width=side, text_length=longest, weight=1)
    capacity = len(LENGTHS) * (side**2 + longest)  # a batch is a pack
    dataset = replace(base.dataset, mock=True, mock_samples=(sample,), num_workers=0)
    return replace(
        base,
        dataset=replace(dataset, task_encoder_seq_length=capacity),
        objective=replace(base.objective, name=ObjectiveName.FLOW, text_dropout=0.0),
        ema=replace(base.ema, kind=EmaKind.NONE),  # the plain loops keep none
    )


def _ways(config: RunConfig, batches: int) -> tuple[dict[str, Callable[[], float]], int]:
    """The training steps to compare, and the number of tokens in a step.

    Returns (steps, tokens): steps maps the name of each method to a function that runs one training
    step and returns its loss.
    """
    import torch
    from measuring.padded import diffusers_network, diffusers_weights, examples

    from dit.distributed.process_groups import device, process_groups, start_processes
    from dit.models.layers.parallel_linear import dtype
    from dit.train.model_and_optimizer import build_model_and_optimizer, randomise
    from dit.train.step import forward_backward, optimizer_step

    logging.getLogger("diffusers").setLevel(logging.ERROR)  # it warns of parts that are not there
    start_processes(seed=config.rng.seed, model=config.model)
    fill = partial(randomise, seed=1)
    model = build_model_and_optimizer(config, process_groups(), fill=fill)
    items = [_item(config, number) for number in range(batches)]
    weights = diffusers_weights(model.chunks[0].module, config.model)
    asked = [list(examples(config, *item)) for item in items]

    def ours() -> float:
        report = forward_backward(model, items, objective=config.objective)
        loss = report.total / report.count
        optimizer_step(model, config=config, number=1, loss=loss)
        return loss

    def loop(errors: Callable[[Any, list[Any]], list[Any]]) -> Callable[[], float]:
        network = diffusers_network(config)
        network.load_state_dict(weights)
        network.to(device(), dtype(config.model)).train()
        adamw = torch.optim.AdamW(network.parameters(), lr=config.optimizer.lr)

        def step() -> float:
            adamw.zero_grad()
            total = 0.0
            for batch in asked:
                found = errors(network, batch)
                weighted = zip(found, batch, strict=True)
                squares = [one.weight * error.square().mean() for error, one in weighted]
                loss = torch.stack(squares).mean() / len(asked)
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(network.parameters(), config.optimizer.clip_grad)
            adamw.step()
            return total

        return step

    ways = {OURS: ours, ALONE: loop(partial(_alone, config)), PADDED: loop(_padded)}
    return ways, sum(batch.real_tokens + sum(batch.text_rows) for batch, _ in items)


def _item(config: RunConfig, number: int) -> Any:
    """A random pack for one micro-batch, as (packed batch, training problem) on the device.

    The pack has one sample for each caption length in LENGTHS; `number` seeds the samples.
    """
    import torch

    from dit.batch import LatentSample
    from dit.data.pack import pack_samples
    from dit.distributed.process_groups import device
    from dit.models.patch_layout import PatchLayout
    from dit.objectives.registry import training_objective
    from dit.objectives.training_target import training_problem
    from dit.pack_wire import pack_to

    model, random = config.model, torch.Generator().manual_seed(config.rng.seed + number)
    (geometry,) = config.dataset.mock_samples
    size = (model.in_channels, 1, geometry.height, geometry.width)
    samples = [
        LatentSample(
            key=f"{number}-{i}",
            latent_CFHW=torch.randn(size, generator=random),
            text_LE=torch.randn(length, model.crossattn_emb_size, generator=random),
            fps=float("nan"),
        )
        for i, length in enumerate(LENGTHS)
    ]
    pack = pack_to(pack_samples(samples, PatchLayout.of(config)), device())
    settings: dict[str, Any] = {"seed": config.rng.seed, "step": 1, "null": {}}
    objective = training_objective(config.objective)
    return training_problem(objective, pack, options=config.objective, **settings)


def _alone(config: RunConfig, network: Any, batch: list[Any]) -> list[Any]:
    """Error (prediction minus target) of the velocity of each sample, by one call each."""
    from dit.batch import TEXT, LatentSample
    from dit.models.registry import diffusers_form

    found, form = [], diffusers_form(config.model)
    for one in batch:
        sample = LatentSample(
            key=one.key, latent_CFHW=one.input_CFHW, text_LE=one.texts[TEXT], fps=one.fps
        )
        made_CFHW = form.run(network, sample, float(one.level), config.model)
        found.append(made_CFHW - one.target_CFHW)
    return found


def _padded(network: Any, batch: list[Any]) -> list[Any]:
    """Error (prediction minus target) of the velocity of each sample, from one call of `network`.

    Captions are padded to the longest one; all samples must have the same size. Each error is [n,
    C], for n latent cells.
    """
    import torch
    from torch.nn.functional import pad

    from dit.batch import TEXT

    texts = [one.texts[TEXT] for one in batch]
    longest, (_, _, rows, columns) = max(map(len, texts)), batch[0].input_CFHW.shape
    lengths = torch.tensor([len(text) for text in texts], device=texts[0].device)
    is_text_BL = torch.arange(longest, device=lengths.device) < lengths[:, None]
    slots = torch.arange(longest + rows * columns // 4, device=lengths.device) >= longest
    (made_BTC,) = network(
        hidden_states=torch.stack([one.input_CFHW.flatten(1).transpose(0, 1) for one in batch]),
        encoder_hidden_states=torch.stack(
            [pad(text, (0, 0, 0, longest - len(text))) for text in texts]
        ),
        encoder_hidden_states_mask=is_text_BL,
        timestep=torch.stack([one.level for one in batch]) / 1000,
        img_shapes=[[(1, rows, columns)]] * len(batch),
        img_mask=slots.expand(len(batch), -1),
        return_dict=False,
    )
    targets = torch.stack([one.target_CFHW.flatten(1).transpose(0, 1) for one in batch])
    return [*(made_BTC[:, longest:] - targets)]


if __name__ == "__main__":
    sys.exit(run(main))
