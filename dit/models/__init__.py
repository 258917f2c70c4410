"""Networks: noisy tokens of a pack in, prediction out.

A network is a list of stacks, each with layers of one kind; pipeline stages cut the list. What is
described here is written for one device: nothing asks for a rank.

family           what a family says of itself
registry         the table of all families
diffusers_form   the networks of a family as Diffusers has them
training_checks  what of a run its network refuses
positions        rules that give tokens their positions
patches          latents <-> tokens, one sample at a time
layer_spec/      sizes and choices of layers and stacks, and what each layer costs
weight_marks     what Megatron-Core must know of weights that tensor ranks share
kernels/         fused kernels for GPUs, of what lies between matrix products
attention/       attention inside each sample of a pack, and which kernel computes it
layers/          parts: linears, norms, positions, modulation, attention
stacks/          layers made of parts, stacks made of layers, networks made of stacks
joint/           what families with joint attention have in common
cost             parameters, operations and memory of a network, from its description
parameter_groups weights with settings of their own, or frozen, by patterns of names
recomputation    what a device of so much memory has to compute again in the backward pass
config_keys      config.json of Diffusers' networks, key by key
diffusers_names  which tensors of Diffusers are which of ours: kinds of rows in a table

Each other folder is a family:

dit/             the DiT, with the arithmetic of Diffusers' `CosmosTransformer3DModel`
flux/            FLUX.1: text, and reference pictures (Kontext), to images
wan/             Wan 2.1 and 2.2: text, a first frame or first and last frame to video
qwen_image/      Qwen-Image and its editing forms: text and pictures to picture
hunyuan_video/   HunyuanVideo: text, or text and a first frame, to video
hunyuan_video_15/  HunyuanVideo 1.5: text, or text and a first frame, to video
sd3/             Stable Diffusion 3 and 3.5: text to image
hunyuan_image/   HunyuanImage 2.1: text, with words in quotation marks, to image
chroma/          Chroma1: text to image
"""
