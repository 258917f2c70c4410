"""Writes pipeline folders with random encoders, to try everything without a download.

VAEs and text encoders are tiny, and their outputs have the sizes of the published ones. Latents of
Wan 2.1 have 16 channels and a stride of 4 x 8 x 8 (frames, rows, columns), its text embeddings a
width of 4,096. Latents of FLUX.2 have 128 channels and a stride of 16 x 16, its text embeddings a
width of 15,360 (dev) or 7,680 (klein 4B). So shards, layouts, memory and times of training are
those of the real models, while generated pictures are noise.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dit.safe_writing import TEMPORARY

WIDTH = 4096  # of UMT5-XXL
_LONGEST = 512  # tokens of a caption
_LETTERS = ["<pad>", "</s>", "<unk>", *map(chr, range(32, 127))]
_NARROW = {"intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
_NARROW |= {"head_dim": 8, "vocab_size": len(_LETTERS)}
_MISTRAL_CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{% for part in m['content'] %}{{ part['text'] }}"
    "{% endfor %}{% endfor %}"
)
_QWEN_CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_wan(folder: Path) -> None:
    """Writes a random VAE and text encoder of Wan 2.1, a tokenizer and a scheduler to `folder`.

    There is no transformer; training makes one.

    Raises:
        FileExistsError: the folder exists.
        ImportError: Diffusers or Transformers is not installed.
    """
    import torch
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
    from diffusers.pipelines.wan.pipeline_wan import WanPipeline
    from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
    from transformers import UMT5Config, UMT5EncoderModel

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
    _save(pipeline, folder, transformer="WanTransformer3DModel")


def write_flux2(folder: Path) -> None:
    """Writes a random text encoder and VAE of FLUX.2 dev, and a scheduler, to `folder`.

    Raises:
        FileExistsError: the folder exists.
        ImportError: Diffusers or Transformers is not installed.
    """
    import torch
    from diffusers.pipelines.flux2.pipeline_flux2 import Flux2Pipeline
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    torch.manual_seed(0)
    text = {"model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 30, **_NARROW}
    tower = {"model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8, "head_dim": 8}
    tower |= {"num_hidden_layers": 1, "num_attention_heads": 1}
    network = Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=text, vision_config=tower)
    )
    _save(_flux2(Flux2Pipeline, network, _MISTRAL_CHAT), folder, transformer=_FLUX2)


def write_flux2_klein(folder: Path) -> None:
    """Writes a random text encoder and VAE of FLUX.2 klein base 4B, and a scheduler, to `folder`.

    Raises:
        FileExistsError: the folder exists.
        ImportError: Diffusers or Transformers is not installed.
    """
    import torch
    from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    text: Any = {"hidden_size": 2560, "num_hidden_layers": 27, **_NARROW}
    network = Qwen3ForCausalLM(Qwen3Config(**text))
    _save(_flux2(Flux2KleinPipeline, network, _QWEN_CHAT), folder, transformer=_FLUX2)


WRITERS: Mapping[str, Callable[[Path], None]] = {
    "wan": write_wan,
    "flux2": write_flux2,
    "flux2_klein": write_flux2_klein,
}
"""Functions that write a folder of random encoders, by the value of `--processor`."""
_FLUX2 = "Flux2Transformer2DModel"


def _flux2(kind: Any, network: Any, chat: str) -> Any:
    """A pipeline of class `kind` with the text encoder `network` and a random VAE of FLUX.2.

    `chat` is the chat template of its tokenizer.
    """
    from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
        FlowMatchEulerDiscreteScheduler,
    )

    return kind(
        tokenizer=_tokenizer(chat),
        text_encoder=network.bfloat16(),
        vae=AutoencoderKLFlux2(block_out_channels=(4,) * 4, layers_per_block=1, norm_num_groups=2),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        transformer=None,
    )


def _save(pipeline: Any, folder: Path, *, transformer: str) -> None:
    """Saves `pipeline`, which has no transformer, to `folder`.

    `transformer` is the class name of the transformer that model_index.json then lists.

    Raises:
        FileExistsError: the folder exists.
    """
    if folder.exists():
        raise FileExistsError(folder)
    unfinished = folder.with_name(folder.name + TEMPORARY)
    shutil.rmtree(unfinished, ignore_errors=True)  # of a call that was interrupted
    pipeline.save_pretrained(unfinished)
    index = unfinished / "model_index.json"
    named = {"transformer": ["diffusers", transformer]}
    index.write_text(json.dumps(json.loads(index.read_text()) | named, indent=2) + "\n")
    unfinished.rename(folder)


def _tokenizer(chat: str | None = None) -> Any:
    """A tokenizer with a token for each printable ASCII character, and one for all others.

    Without a chat template (`chat`) it ends each text with an end token.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    vocabulary = {letter: number for number, letter in enumerate(_LETTERS)}
    built = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    if chat is None:
        built.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=built,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=_LONGEST,
        chat_template=chat,
    )
