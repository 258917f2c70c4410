"""Folders in the layout of Diffusers whose networks are tiny and random."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import (
    ByT5Tokenizer,
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModel,
    Gemma2Config,
    Gemma2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen3Config,
    Qwen3Model,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from tests.families.stand_ins import IMAGE_TOKEN

CHAT = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"


def randomized(network: torch.nn.Module) -> torch.nn.Module:
    """No weight is zero, so that everything shows in the output."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return network.eval()


def tokenizer(length: int = 64) -> PreTrainedTokenizerFast:
    """One token a character."""
    letters = ["<pad>", "</s>", "<unk>", *map(chr, range(32, 127))]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
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
        model_max_length=length,
        chat_template=CHAT,
        padding_side="right",
    )


def _t5(kind: Any, config: Any, vocabulary: int = 98, width: int = 16) -> Any:
    sizes = {"d_model": width, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    return randomized(kind(config(vocab_size=vocabulary, **sizes)))


def _transformer(kind: Any, config: Any, **more: Any) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3}
    return randomized(kind(config(**sizes, num_attention_heads=2, **more)))


def _clip() -> Any:
    return _transformer(
        CLIPTextModel, CLIPTextConfig, vocab_size=98, max_position_embeddings=77,
        eos_token_id=1, pad_token_id=0, bos_token_id=2,
    )  # fmt: skip


def save(root: Path, parts: dict[str, Any]) -> Path:
    for name, part in parts.items():
        part.save_pretrained(root / name)
    return root


def _flux_vae(channels: int = 4) -> Any:
    """A stride of 2."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(
        block_out_channels=(4, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=2,
        shift_factor=0.1159,
        scaling_factor=0.3611,
    )
    return randomized(vae)


def flux(root: Path) -> Path:
    texts = {"tokenizer": tokenizer(77), "tokenizer_2": tokenizer(), "text_encoder": _clip()}
    texts["text_encoder_2"] = _t5(T5EncoderModel, T5Config)
    return save(root, {"vae": _flux_vae(), **texts})


def lumina2(root: Path) -> Path:
    """Gemma 2 of three layers, and the VAE of FLUX.1."""
    keys: Any = {"num_key_value_heads": 1, "head_dim": 8, "query_pre_attn_scalar": 8}
    gemma = _transformer(Gemma2Model, Gemma2Config, vocab_size=98, **keys)
    parts = {"vae": _flux_vae(), "tokenizer": tokenizer(2048), "text_encoder": gemma}
    return save(root, parts)


def _qwen3() -> Any:
    return _transformer(Qwen3Model, Qwen3Config, vocab_size=98, num_key_value_heads=1, head_dim=8)


def zimage(root: Path) -> Path:
    """Qwen3 of three layers with a chat's template, and the VAE of FLUX.1."""
    words = tokenizer(512)
    begun = "{% if add_generation_prompt %}A{% if not enable_thinking %}:{% endif %}{% endif %}"
    words.chat_template = CHAT + begun
    return save(root, {"vae": _flux_vae(), "tokenizer": words, "text_encoder": _qwen3()})


def omnigen2(root: Path) -> Path:
    """Qwen2.5-VL with its processor's tokenizer, and the VAE of FLUX.1."""
    parts = {"vae": _flux_vae(), "processor": tokenizer(2048), "mllm": _qwen_vl()}
    return save(root, parts)


def hidream(root: Path) -> Path:
    """Two CLIP encoders that pool 4 and 6 numbers, T5, Llama of three layers; the VAE of FLUX.1."""
    sizes: Any = {
        "vocab_size": 98, "max_position_embeddings": 248, "eos_token_id": 1, "pad_token_id": 0,
        "bos_token_id": 2,
    }  # fmt: skip
    parts: dict[str, Any] = {"vae": _flux_vae()}
    for end, width in (("", 4), ("_2", 6)):
        clip: Any = _transformer(
            CLIPTextModelWithProjection, CLIPTextConfig, **sizes, projection_dim=width
        )
        parts |= {f"text_encoder{end}": clip, f"tokenizer{end}": tokenizer(248)}
    llama = LlamaConfig(
        vocab_size=98, hidden_size=20, intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    parts |= {"text_encoder_3": _t5(T5EncoderModel, T5Config), "tokenizer_3": tokenizer(512)}
    parts |= {"text_encoder_4": randomized(LlamaForCausalLM(llama)), "tokenizer_4": tokenizer(512)}
    return save(root, parts)


def wan(root: Path) -> Path:
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan(base_dim=4, z_dim=16, num_res_blocks=1)
    vision = _transformer(CLIPVisionModel, CLIPVisionConfig, image_size=32, patch_size=16)
    parts = {"vae": randomized(vae), "image_encoder": vision, "tokenizer": tokenizer()}
    size = {"height": 32, "width": 32}
    parts["image_processor"] = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size)
    parts["text_encoder"] = _t5(UMT5EncoderModel, UMT5Config)
    return save(root, parts)


def wan22(root: Path) -> Path:
    """As Wan 2.2 5B: an autoencoder with 48 channels and a stride of 16, no image encoder."""
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan(
        base_dim=4, decoder_base_dim=4, z_dim=48, num_res_blocks=1, is_residual=True, patch_size=2,
        in_channels=12, out_channels=12, scale_factor_spatial=16,
        latents_mean=torch.linspace(-0.5, 0.5, 48).tolist(),
        latents_std=torch.linspace(0.5, 2, 48).tolist(),
    )  # fmt: skip
    parts = {"vae": randomized(vae), "tokenizer": tokenizer()}
    parts["text_encoder"] = _t5(UMT5EncoderModel, UMT5Config)
    return save(root, parts)


def hunyuan(root: Path) -> Path:
    from diffusers import AutoencoderKLHunyuanVideo15

    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(32, 32, 32), layers_per_block=1,
        spatial_compression_ratio=4, temporal_compression_ratio=4,
    )  # fmt: skip
    qwen = _transformer(
        Qwen2_5_VLTextModel, Qwen2_5_VLTextConfig, vocab_size=98, num_key_value_heads=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    )  # fmt: skip
    vision = _transformer(SiglipVisionModel, SiglipVisionConfig, image_size=32, patch_size=16)
    parts = {"vae": randomized(vae), "text_encoder": qwen, "tokenizer": tokenizer(2048)}
    parts |= {"image_encoder": vision, "tokenizer_2": ByT5Tokenizer()}
    parts["feature_extractor"] = SiglipImageProcessor(size={"height": 32, "width": 32})
    parts["text_encoder_2"] = _t5(T5EncoderModel, T5Config, vocabulary=384)
    return save(root, parts)


def hunyuan_video(root: Path) -> Path:
    """As the first HunyuanVideo; its instruction is longer than the tokenizers of the others."""
    from diffusers import AutoencoderKLHunyuanVideo

    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=2
    )
    llama = _transformer(
        LlamaModel, LlamaConfig, vocab_size=98, num_key_value_heads=2, max_position_embeddings=2048
    )
    parts = {"vae": randomized(vae), "text_encoder": llama, "tokenizer": tokenizer(2048)}
    parts |= {"text_encoder_2": _clip(), "tokenizer_2": tokenizer(77)}
    return save(root, parts)


def _llava_tokenizer() -> PreTrainedTokenizerFast:
    """Words of the pipeline's instruction are a token each, other letters as above.

    So `<image>` is the sixth token, and about 103 come before a caption, as the pipeline has it.
    """
    from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video_image2video as pipeline

    made, instruction = tokenizer(2048), pipeline.DEFAULT_PROMPT_TEMPLATE["template"]
    words = dict.fromkeys(re.findall(r"[A-Za-z]{3,}", re.sub("<.*?>", "", instruction)))
    made.add_tokens([AddedToken(word, lstrip=True, single_word=True) for word in words])
    special = dict.fromkeys(["<|begin_of_text|>", "\n\n", *re.findall("<.*?>", instruction)])
    made.add_tokens([*special], special_tokens=True)
    begin: Any = ("<|begin_of_text|>", made.convert_tokens_to_ids("<|begin_of_text|>"))
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[begin]
    )
    return made


def hunyuan_video_i2v(root: Path) -> Path:
    """The same with Llava, which makes 24 x 24 rows of a picture; no transformer."""
    letters = _llava_tokenizer()
    tower = {
        "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 48, "patch_size": 2,
    }  # fmt: skip
    text = {
        "model_type": "llama", "vocab_size": len(letters), "hidden_size": 16,
        "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 2048,
    }  # fmt: skip
    image: Any = letters.convert_tokens_to_ids("<image>")
    padding: Any = {"pad_token_id": 0}  # of no field of its own: the pipeline looks for it here
    config = LlavaConfig(vision_config=tower, text_config=text, image_token_index=image, **padding)
    size = {"height": 48, "width": 48}
    parts = {
        "text_encoder": randomized(LlavaForConditionalGeneration(config)),
        "tokenizer": letters,
        "image_processor": CLIPImageProcessor(size={"shortest_edge": 48}, crop_size=size),
    }
    return save(hunyuan_video(root), parts)


def cosmos(root: Path) -> Path:
    from diffusers import AutoencoderKLCosmos

    vae = AutoencoderKLCosmos(
        latent_channels=16, encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8), attention_resolutions=(), resolution=64,
        num_layers=1,
    )  # fmt: skip
    parts = {"vae": randomized(vae), "tokenizer": tokenizer()}
    parts["text_encoder"] = _t5(T5EncoderModel, T5Config)
    return save(root, parts)


def qwen_vl_text(vocabulary: int) -> dict[str, Any]:
    """Configuration of the half of Qwen-VL that reads text."""
    return {
        "vocab_size": vocabulary, "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "bos_token_id": 2, "eos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }  # fmt: skip


def cosmos25(root: Path) -> Path:
    from diffusers import AutoencoderKLWan, CosmosTransformer3DModel

    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16}
    vision["intermediate_size"] = 16
    config = Qwen2_5_VLConfig(text_config=qwen_vl_text(98), vision_config=vision)
    transformer = CosmosTransformer3DModel(
        in_channels=17, num_attention_heads=2, attention_head_dim=16, num_layers=1, mlp_ratio=2.0,
        text_embed_dim=24, adaln_lora_dim=4, max_size=(4, 16, 16), use_crossattn_projection=True,
        crossattn_proj_in_channels=48, encoder_hidden_states_channels=24,
    )  # fmt: skip
    vae = AutoencoderKLWan(base_dim=4, z_dim=16, num_res_blocks=1)
    parts = {"vae": randomized(vae), "tokenizer": tokenizer(600), "transformer": transformer}
    parts["text_encoder"] = randomized(Qwen2_5_VLForConditionalGeneration(config))
    return save(root, parts)


def _qwen_vl() -> Any:
    """Qwen2.5-VL with a tower that sees pictures."""
    tower = {
        "depth": 2, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16,
        "intermediate_size": 16, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=qwen_vl_text(101), vision_config=tower, image_token_id=IMAGE_TOKEN,
        vision_start_token_id=98, vision_end_token_id=99, video_token_id=97,
    )  # fmt: skip
    return randomized(Qwen2_5_VLForConditionalGeneration(config))


def ltx(root: Path, *, pipeline: str = "LTXConditionPipeline") -> Path:
    """As of 0.9.5: a VAE with statistics whose decoder is told a level, and the pipeline's name."""
    from diffusers import AutoencoderKLLTXVideo

    widths, layers = (8,) * 4, (1,) * 5
    vae = AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=widths, decoder_block_out_channels=widths,
        layers_per_block=layers, decoder_layers_per_block=layers, timestep_conditioning=True,
    )  # fmt: skip
    vae.latents_mean.copy_(torch.linspace(-0.5, 0.5, 8))
    vae.latents_std.copy_(torch.linspace(0.5, 2, 8))
    parts = {"vae": randomized(vae), "tokenizer": tokenizer(256)}
    parts["text_encoder"] = _t5(T5EncoderModel, T5Config)
    index = {"_class_name": pipeline, "_diffusers_version": "0.35.0"}
    root.mkdir(parents=True, exist_ok=True)
    (root / "model_index.json").write_text(json.dumps(index))
    return save(root, parts)


def ltx2_vaes() -> dict[str, Any]:
    """Tiny VAEs of LTX-2's frames (8 channels) and sound (4 x 4), by their names in a pipeline."""
    from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video

    vae = AutoencoderKLLTX2Video(
        latent_channels=8, block_out_channels=(8,) * 4, decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 4,
        spatial_compression_ratio=32, temporal_compression_ratio=8,
    )  # fmt: skip
    heard = AutoencoderKLLTX2Audio(
        base_channels=16, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=4, mel_bins=16,
    )  # fmt: skip
    for one, size in ((vae, 8), (heard, 16)):
        one.latents_mean.copy_(torch.linspace(-0.5, 0.5, size))
        one.latents_std.copy_(torch.linspace(0.5, 2, size))
    return {"vae": vae, "audio_vae": heard}


def ltx2(root: Path, *, version: str = "2.3") -> Path:
    """The parts of LTX-2.0, or of 2.3, which projects captions for each of its streams."""
    from diffusers.pipelines.ltx2 import connectors, vocoder
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3TextConfig,
        SiglipVisionConfig,
    )

    vaes = ltx2_vaes()
    is_first, lengths = version == "2.0", {"resnet_kernel_sizes": [3], "resnet_dilations": [[1]]}
    made: Any = vocoder.LTX2Vocoder(in_channels=32, hidden_channels=32, **lengths)
    if not is_first:
        wide = {f"bwe_{name}": value for name, value in lengths.items()}
        made = vocoder.LTX2VocoderWithBWE(
            in_channels=32, hidden_channels=64, bwe_in_channels=32, bwe_hidden_channels=32,
            num_mel_channels=16, **lengths, **wide,
        )  # fmt: skip
        for basis in (made.mel_stft.mel_basis, made.mel_stft.stft_fn.forward_basis):
            basis.normal_(generator=torch.Generator().manual_seed(0))
    text = Gemma3TextConfig(
        vocab_size=98, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, query_pre_attn_scalar=8,
    )  # fmt: skip
    sees = SiglipVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        image_size=28, patch_size=14,
    )  # fmt: skip
    gemma = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=sees))
    own = {"per_modality_projections": True, "proj_bias": True, "video_gated_attn": True}
    own |= {"video_hidden_dim": 32, "audio_hidden_dim": 16, "audio_gated_attn": True}
    connected = connectors.LTX2TextConnectors(
        caption_channels=16, text_proj_in_factor=3, rope_type="split",
        video_connector_num_attention_heads=2, audio_connector_num_attention_heads=2,
        video_connector_attention_head_dim=8 if is_first else 16,
        audio_connector_attention_head_dim=8, video_connector_num_learnable_registers=16,
        audio_connector_num_learnable_registers=16, **({} if is_first else own),
    )  # fmt: skip
    parts = {**vaes, "vocoder": made, "text_encoder": gemma}
    parts["connectors"] = connected
    return save(root, {**{k: randomized(v) for k, v in parts.items()}, "tokenizer": tokenizer(64)})


def qwen_image(root: Path) -> Path:
    """Qwen2.5-VL, a tokenizer of one token a character, a VAE."""
    parts = {"vae": qwen_image_vae(16), "tokenizer": tokenizer(2048), "text_encoder": _qwen_vl()}
    return save(root, parts)


def qwen_image_vae(channels: int) -> Any:
    """Qwen-Image's VAE, with statistics that differ."""
    from diffusers import AutoencoderKLQwenImage

    vae = AutoencoderKLQwenImage(
        base_dim=4, z_dim=channels, num_res_blocks=1,
        latents_mean=torch.linspace(-0.5, 0.5, channels).tolist(),
        latents_std=torch.linspace(0.5, 2, channels).tolist(),
    )  # fmt: skip
    return randomized(vae)


def anima(root: Path) -> Path:
    """Qwen3, whose tokenizer adds no end, T5's tokenizer, the conditioner, Qwen-Image's VAE."""
    from diffusers import AnimaTextConditioner

    conditioner = AnimaTextConditioner(
        source_dim=16, target_dim=20, model_dim=24, num_layers=2, num_attention_heads=2,
        target_vocab_size=98,
    )  # fmt: skip
    words = tokenizer(2048)
    words.backend_tokenizer.post_processor = processors.Sequence([])
    parts = {"vae": qwen_image_vae(4), "tokenizer": words, "t5_tokenizer": tokenizer(2048)}
    parts |= {"text_encoder": _qwen3(), "text_conditioner": randomized(conditioner)}
    return save(root, parts)


def longcat(root: Path) -> Path:
    """The same text encoder and tokenizer, which knows the signs of pictures; a VAE of FLUX.1's."""
    letters = tokenizer(2048)
    letters.add_tokens(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"], special_tokens=True)
    assert letters.convert_tokens_to_ids("<|image_pad|>") == IMAGE_TOKEN
    return save(root, {"vae": _flux_vae(16), "tokenizer": letters, "text_encoder": _qwen_vl()})


def hunyuanimage(root: Path) -> Path:
    """Qwen2.5-VL and ByT5; a VAE of 4 channels and a stride of 4."""
    from diffusers import AutoencoderKLHunyuanImage

    vae = AutoencoderKLHunyuanImage(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(32, 32, 32),
        layers_per_block=1, spatial_compression_ratio=4, sample_size=64, scaling_factor=0.75,
    )  # fmt: skip
    parts = {"vae": randomized(vae), "text_encoder": _qwen_vl(), "tokenizer": tokenizer(2048)}
    parts |= {"text_encoder_2": _t5(T5EncoderModel, T5Config, vocabulary=384)}
    return save(root, parts | {"tokenizer_2": ByT5Tokenizer()})


MAKERS = {"flux": flux, "wan": wan, "hunyuan": hunyuan, "cosmos": cosmos}
