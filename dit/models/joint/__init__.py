"""Code shared by families whose layers attend to latents and text jointly (FLUX, SD3, ...).

family            sizes and their rules; layers
refined           layers of networks with separate refiners for latents and text (Lumina, Z-Image)
tensor_names      Diffusers' names of the tensors of joint layers
sequential_names  Diffusers' names for layers with norms around attention and MLP (Lumina, Z-Image)
lumina_names      Diffusers' names and config.json of networks like Lumina's (Lumina, OmniGen2)
linear_names      names of linears in the original code of FLUX and Hunyuan, for adapter files
diffusers         shared code of their Diffusers forms: keys of config.json, calls of a network
"""
