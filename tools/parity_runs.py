"""The runs of `parity.py`, each of which takes seconds on two cores."""

from __future__ import annotations

from dataclasses import dataclass

SHORT = (
    *("model.num_layers=4", "train.train_iters=6", "train.eval_interval=3", "train.eval_iters=2"),
    *("checkpoint.save_interval=3", "scheduler.lr_decay_iters=20", "optimizer.lr=1e-3"),
    *("logger.log_interval=1", "validation.sampling_steps=3"),
)
MEDIA = (*SHORT, "dataset.mock=false", "dataset.path=media", "dataset.task_encoder_seq_length=256")
DIGITS = (
    *("dataset.path=digits", "model.num_layers=2", "model.hidden_size=48", "train.train_iters=6"),
    *("model.num_attention_heads=2", "model.adaln_lora_dim=8", "checkpoint.save_interval=3"),
    *("dataset.task_encoder_seq_length=256", "dataset.packing_buffer_size=32"),
    *("dataset.shuffle_buffer_size=20", "logger.log_interval=1", "train.eval_interval=3"),
    *("scheduler.lr_warmup_iters=2", "validation.num_captions=2", "validation.sampling_steps=3"),
)
GOLDEN = ("optimizer.lr=1e-3", "validation.num_captions=2", "validation.sampling_steps=3")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A training, and the commands that then use its checkpoints."""

    covers: str
    changes: tuple[str, ...] = ()
    config: str = "dit_debug"
    processes: int = 1
    data_ranks: int = 1
    resumed: tuple[str, ...] = ()  # changes of a second launch, which resumes; empty: no second one
    generations: tuple[tuple[str, ...], ...] = ()  # options of each generation
    exports: tuple[tuple[str, ...], ...] = ()  # options of each export
    imports: bool = False  # whether each export is imported again


def _layout(covers: str, *changes: str, processes: int = 2, data_ranks: int = 1) -> Run:
    changes = (*SHORT, *changes)
    return Run(covers=covers, changes=changes, processes=processes, data_ranks=data_ranks)


_PICTURE = ("--prompt", "a red cat", "--height", "24", "--width", "16", "--num_steps", "4")
_PICTURE += ("--num_video_frames", "1")
_VIDEO = ("--prompt", "a blue dog runs", "--height", "16", "--width", "24", "--num_steps", "4")
_VIDEO += ("--num_video_frames", "5", "--fps", "12")
_DIGIT = ("--prompt", "a handwritten seven", "--num_images_per_prompt", "2", "--num_steps", "6")
RUNS = {
    "golden_edm": Run(
        covers="the golden losses of EDM: 20 steps, validation, samples of captions",
        changes=GOLDEN,
        exports=((), ("--weights", "model", "--dtype", "bf16")),
    ),
    "golden_flow": Run(
        covers="the golden losses of flow matching",
        changes=("objective.name=flow", *GOLDEN),
        exports=((),),
    ),
    "linear": Run(
        covers="flow matching: linear weighting, shift by tokens, `mode` density, mean by sample;"
        " an average of constant decay",
        changes=(
            *(*SHORT, "objective.name=flow", "objective.weighting=linear", "ema.kind=constant"),
            *("objective.flow_shift=3", "objective.shift_base_tokens=64", "ema.decay=0.9"),
            *("objective.density=mode", "objective.loss_mean=sample", "validation.num_captions=2"),
            "validation.sampler=unipc",
        ),
        exports=(("--no-scheduler",),),
    ),
    "cosmos": Run(
        covers="Cosmos-like on pictures and videos: learnable positions, padding mask, projected"
        " text filled up to 512, RoPE scale; generation, export and import",
        changes=(
            *(*MEDIA, "model.extra_pos_embed=learnable", "model.concat_padding_mask=true"),
            *("model.crossattn_proj_size=24", "model.text_pad_to=512", "model.max_size=[8,32,32]"),
            *("model.rope_scale=[2.0,1.0,1.5]", "dataset.num_workers=1"),
            "dataset.max_bad_fraction=0.9",
        ),
        generations=(_PICTURE, (*_VIDEO, "--weights", "model", "--guidance", "3")),
        exports=((),),
        imports=True,
    ),
    "bf16": Run(
        covers="bf16 with float32 main weights in the distributed optimizer",
        changes=(*SHORT, "model.precision=bf16"),
        exports=((), ("--weights", "model")),
    ),
    "bf16_whole_optimizer": Run(
        covers="bf16 with float32 main weights, optimizer not distributed; gradients in bf16",
        changes=(
            *(*SHORT, "model.precision=bf16", "ddp.use_distributed_optimizer=false"),
            "ddp.grad_reduce_in_fp32=false",
        ),
    ),
    "shards": Run(
        covers="pictures and videos in shards, some samples refused, 2 workers; resumed with 3"
        " workers, who share the samples out anew; generation with guidance and bounds",
        changes=(*MEDIA, "dataset.num_workers=2", "dataset.max_bad_fraction=0.9"),
        resumed=("dataset.num_workers=3", "train.train_iters=9"),
        generations=(
            (*_PICTURE, "--guidance_interval", "0.1", "10", "--guidance_rescale", "0.5"),
            (*_VIDEO, "--sampler", "dpm++", "--negative_prompt", "a cat"),
        ),
    ),
    "digits_flow": Run(
        covers="the digits with flow matching, a worker, a second validation set; resumed as it"
        " was; generation by UniPC and Euler",
        config="dit_digits_flow",
        changes=(*DIGITS, "validation.sets=[{name: again, path: digits}]"),
        resumed=("train.train_iters=8",),
        generations=((*_DIGIT, "--sampler", "unipc"), (*_DIGIT, "--sampler", "euler")),
        exports=((),),
        imports=True,
    ),
    "balance_flops": _layout(
        "balance=flops over 2 data ranks, 2 workers each",
        *("dataset.balance=flops", "dataset.balance_packs=8", "dataset.num_workers=2"),
        data_ranks=2,
    ),
    "tp2_sp": _layout(
        "2 tensor ranks with sequence parallelism",
        *("model.tensor_model_parallel_size=2", "model.sequence_parallel=true"),
    ),
    "cp2_a2a": _layout(
        "2 context ranks that exchange heads",
        *("model.context_parallel_size=2", "model.cp_comm_type=a2a"),
    ),
    "cp2_all_gather": _layout(
        "2 context ranks that gather keys and values",
        *("model.context_parallel_size=2", "model.cp_comm_type=all_gather"),
    ),
    "pp2_virtual": _layout(
        "2 pipeline stages of 2 groups of layers each; samples of captions",
        *("model.pipeline_model_parallel_size=2", "model.virtual_pipeline_model_parallel_size=2"),
        "validation.num_captions=2",
    ),
    "dp2_overlap": _layout(
        "2 data ranks, gradients and weights sent while others are computed",
        *("ddp.overlap_grad_reduce=true", "ddp.overlap_param_gather=true"),
        "ddp.bucket_size=20000",
        data_ranks=2,
    ),
    "tp2_cp2": _layout(
        "2 tensor ranks with sequence parallelism x 2 context ranks; 4 processes",
        *("model.tensor_model_parallel_size=2", "model.sequence_parallel=true"),
        "model.context_parallel_size=2",
        processes=4,
    ),
    "recompute_full": Run(
        covers="all layers recomputed in the backward pass",
        changes=(*SHORT, "model.recompute_granularity=full"),
    ),
    "recompute_selective": Run(
        covers="outputs of attention recomputed in the backward pass",
        changes=(*SHORT, "model.recompute_granularity=selective"),
    ),
}
