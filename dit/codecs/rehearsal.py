"""The folder of Wan's pipeline with random encoders, to try the whole way without a download.

VAE and text encoder are tiny inside, and what comes out has the sizes of the published ones: 16
channels and a stride of 4 x 8 x 8, and rows of 4,096 numbers. So shards, layouts, memory and times
of training are those of the real folder. Pictures are noise.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from dit.safe_writing import TEMPORARY

WIDTH = 4096  # of UMT5-XXL
_LONGEST = 512  # tokens of a caption
_LETTERS = ["<pad>", "</s>", "<unk>", *map(chr, range(32, 127))]


def write_wan(folder: Path) -> None:
    """Writes VAE, text encoder, tokenizer and scheduler; there is no transformer, as for training.

    Raises:
        FileExistsError: the folder exists.
        ImportError: Diffusers or Transformers is not installed.
    """
    import torch
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
    from diffusers.pipelines.wan.pipeline_wan import WanPipeline
    from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
    from transformers import UMT5Config, UMT5EncoderModel
    from transformers.utils.logging import disable_progress_bar

    if folder.exists():
        raise FileExistsError(folder)
    disable_progress_bar()
    torch.manual_seed(0)
    text = UMT5Config(
        vocab_size=len(_LETTERS), d_model=WIDTH, d_kv=8, d_ff=8, num_layers=1, num_heads=1
    )
    scheduler: Any = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    pipeline = WanPipeline(
        tokenizer=_tokenizer(),
        text_encoder=UMT5EncoderModel(text).bfloat16(),
        vae=AutoencoderKLWan(base_dim=4, num_res_blocks=1),
        scheduler=scheduler,
    )
    unfinished = folder.with_name(folder.name + TEMPORARY)
    shutil.rmtree(unfinished, ignore_errors=True)  # of a call that was interrupted
    pipeline.save_pretrained(unfinished)
    index = unfinished / "model_index.json"
    named = {"transformer": ["diffusers", "WanTransformer3DModel"]}
    index.write_text(json.dumps(json.loads(index.read_text()) | named, indent=2) + "\n")
    unfinished.rename(folder)


def _tokenizer() -> Any:
    """A token for each letter of ASCII, and one for all others."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: number for number, letter in enumerate(_LETTERS)}
    built = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    built.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=built,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=_LONGEST,
    )
