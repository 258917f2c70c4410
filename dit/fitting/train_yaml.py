"""Writes a run as train.yaml, whose comments give the reason for each number."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from dit.fitting.corpus import Corpus
from dit.fitting.proposal import Draft, Proposal
from dit.fitting.rules import (
    LAST_LEVEL,
    LEARNED_GUIDANCE,
    TEXT_DROPOUT,
    WANTED_PASSES,
    noise_levels,
)
from dit.progress import brief

NAME = "train.yaml"
_VALIDATIONS = 5
_SHOWN = 16  # captions of a validation
_KEPT = 4  # checkpoints in a run
_UNCHANGED = "# A change keeps this file from being replaced: "

Line = tuple[str, Any, str]
"""(key, value, reason) of a line of train.yaml."""


def run_folder(folder: Path) -> Path:
    """The run folder for the dataset in `folder`, next to that folder.

    Packing again with --overwrite does not touch it.
    """
    return folder.with_name(f"{folder.name}_run")


def settings(corpus: Corpus, draft: Draft, *, steps: int) -> dict[str, list[Line]]:
    """The lines of train.yaml by group, for the run `draft` of `steps` steps."""
    by, every = draft.by, max(1, steps // _VALIDATIONS)
    return {
        "model": list(_model(corpus, draft)),
        "dataset": list(_dataset(corpus, draft)),
        "objective": list(_objective(corpus)),
        "train": [
            ("train_iters", steps, "optimizer steps"),
            ("global_batch_size", 1, f"packs in one step: about {brief(draft.samples)} samples"),
            ("micro_batch_size", 1, "always 1: a pack holds many samples"),
            ("eval_interval", every, "steps between validations"),
            ("eval_iters", 1, "packs in one validation"),
        ],
        "validation": list(_validation(corpus, passes=steps * draft.samples / corpus.samples)),
        "optimizer": [
            ("lr", by.lr, "measured with these networks; falls to zero at the last step"),
            ("min_lr", 0.0, "where the cosine ends"),
            ("weight_decay", 0.01, "on matrices only"),
            ("adam_beta1", 0.9, "decay per step of the mean gradient"),
            ("adam_beta2", by.beta2, "that of the mean squared gradient"),
            ("clip_grad", 1.0, "largest norm of the whole gradient"),
        ],
        "scheduler": [
            ("lr_decay_style", "cosine", "ends at train.train_iters"),
            ("lr_warmup_iters", min(by.warm_up, steps // 2), "steps from 0 to optimizer.lr"),
        ],
        "ema": [
            ("kind", "power", "average of the weights, which generation uses"),
            ("sigma_rel", by.sigma_rel, "its width, relative to the steps so far"),
        ],
        "checkpoint": [
            ("save", str(run_folder(corpus.folder)), "run folder: checkpoints, metrics, pictures"),
            ("save_interval", max(1, steps // _KEPT), "steps between checkpoints"),
            ("keep_last", 2, "newest checkpoints that stay"),
        ],
        "logger": [("log_interval", 10, "steps between lines in the terminal")],
    }


def _model(corpus: Corpus, draft: Draft) -> Iterator[Line]:
    size, by, patch = draft.size, draft.by, draft.patch
    yield "name", size.name, "none of the named sizes" if size.name == "custom" else "a named size"
    yield "family", "dit", "reads latents and one text of any shards"
    if size.name == "custom":
        yield "num_layers", size.layers, "transformer layers"
        yield "hidden_size", size.width, "width of a token inside the network"
        yield "num_attention_heads", size.heads, f"heads of width {size.width // size.heads}"
    yield "adaln_lora_dim", by.adaln_rank, "rank of each modulation"
    yield "in_channels", corpus.channels, "channels of the latents"
    tokens = f"{brief(draft.tokens)} tokens a sample on average"
    yield "patch_spatial", patch, f"{patch} x {patch} cells are a token: {tokens}"
    yield "patch_temporal", 1, "frames of the latent in one token"
    yield "crossattn_emb_size", corpus.text_width, "width of the text in the shards"
    if corpus.colours is not None and size.name == "custom":
        yield "extra_pos_embed", "learnable", "learned positions: lower loss in fewer steps"
        yield "max_size", list(corpus.largest), "frames, rows, columns of the largest latent"
    why = "most CPUs are no faster in bf16" if by.precision == "fp32" else "of matrix products"
    yield "precision", by.precision, why


def _dataset(corpus: Corpus, draft: Draft) -> Iterator[Line]:
    samples = max(1, round(draft.samples))
    yield "path", str(corpus.folder), "these shards"
    yield "task_encoder_seq_length", draft.capacity, f"tokens in one pack: {samples} samples"
    yield "packing_buffer_size", max(16, 2 * samples), "samples looked at to fill packs: two packs"
    yield "sample_multiple", draft.multiple, "each sample is padded to a multiple of this"
    yield "num_workers", 1, "one process reads while the other trains"
    held = max(100, min(corpus.samples, 1000))
    yield "shuffle_buffer_size", held, "samples held for shuffling"
    frames, rows, columns = max(corpus.sizes, key=lambda shape: shape[0] * shape[1] * shape[2])
    mock: dict[str, Any] = {"frames": frames, "height": rows, "width": columns}
    mock |= {"text_length": max(1, round(corpus.text_rows)), "weight": 1}
    yield "mock_samples", [mock], "what --mock draws from instead"
    said = "a part was held out" if corpus.has_val else "no sample was held out"
    yield "use_train_split_for_val", not corpus.has_val, said


def _objective(corpus: Corpus) -> Iterator[Line]:
    levels = noise_levels(
        colours=corpus.colours,
        basis=corpus.basis,
        side=corpus.side,
        own_captions=corpus.own_captions,
    )
    yield "name", "edm", "arXiv:2206.00364"
    yield "p_mean", levels.mean, f"mean of ln(sigma) in training: {levels.why}"
    yield "p_std", levels.std, "its standard deviation"
    if _is_named_by_captions(corpus):
        yield "sigma_min", LAST_LEVEL, "where the sampler ends: cleaner, and no details below it"
    yield "text_dropout", TEXT_DROPOUT, "samples that train without caption, for guidance"


def _validation(corpus: Corpus, *, passes: float) -> Iterator[Line]:
    yield "num_captions", _SHOWN, "pictures made at each validation"
    yield "sampling_steps", 18, "steps of the sampler"
    if _is_named_by_captions(corpus) and passes >= WANTED_PASSES:
        yield "guidance", LEARNED_GUIDANCE, "none: cleaner if each caption was seen so often"


def _is_named_by_captions(corpus: Corpus) -> bool:
    """Whether pictures are coloured and most captions unique.

    Then a caption leads to one picture, not to a mean of several.
    """
    return corpus.colours == 3 and corpus.own_captions


def tokens(groups: dict[str, list[Line]]) -> list[str]:
    """Settings of `groups` as arguments of a command line, each GROUP.KEY=VALUE."""
    return [
        f"{group}.{key}={_shown(value)}" for group, keys in groups.items() for key, value, _ in keys
    ]


def _shown(value: Any) -> str:
    """`value` as YAML."""
    if isinstance(value, str):
        return value if value.isidentifier() else json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        return f"{value:.1f}" if value == int(value) else f"{value:.10f}".rstrip("0")
    return json.dumps(value)


def file_text(corpus: Corpus, proposal: Proposal, *, machine: str) -> str:
    """Text of train.yaml for `proposal`; its last line is a digest, which `put_aside` compares."""
    draft = proposal.draft
    head = [
        f"Trains on {corpus.folder.name}: {brief(corpus.samples)} samples, each seen about"
        f" {brief(proposal.passes)} times.",
        f"About {brief(proposal.minutes)} minutes on {machine}, {proposal.seconds:.2g} s a step.",
        f"The network is {proposal.why}.",
        *(f"Warning: {one}." for one in proposal.warnings),
        "Written by `python recipes/fit_run.py`; --minutes fits it to another time.",
    ]
    lines = [f"# {line}" for line in head]
    for name, keys in settings(corpus, draft, steps=proposal.steps).items():
        lines += ["", f"{name}:"]
        lines += [f"  {key}: {_shown(value)}  # {why}" for key, value, why in keys]
    text = "\n".join(lines) + "\n"
    return f"{text}\n{_UNCHANGED}{_digest(text)}\n"


def put_aside(place: Path) -> Path | None:
    """Renames the file `place` if a person has changed it, to train_1.yaml or the next free name.

    Returns the new path; None if there is no file, or it is unchanged and may be replaced.
    """
    if not place.is_file():
        return None
    text, _, last = place.read_text(errors="replace").rpartition(f"\n{_UNCHANGED}")
    if last == f"{_digest(text)}\n":
        return None
    names = (place.with_name(f"{place.stem}_{number}{place.suffix}") for number in count(1))
    return place.rename(next(name for name in names if not name.exists()))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
