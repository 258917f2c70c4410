"""What families share whose layers attend to latents and text together (FLUX, SD3, Hunyuan, ...).

family        sizes and their rules; layers
refined       layers of networks that refine latents and text apart (Lumina, Z-Image)
layered       likewise of networks each of whose layers sees another layer's text (HiDream)
tensor_names  names of these layers' tensors in Diffusers
sequential_names  likewise of layers with norms around attention and MLP (Lumina, Z-Image)
lumina_names  likewise of networks of Lumina's kind, and keys of config.json (Lumina, OmniGen2)
expert_names  likewise of layers with experts (HiDream)
linear_names  names of linears in the code of FLUX and of the Hunyuan models, which adapters have
diffusers     what they have in common there: keys of config.json, running a network
"""
