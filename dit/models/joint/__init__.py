"""What families share whose layers attend to latents and text together (FLUX, SD3, Hunyuan, ...).

config        sizes and their rules
layers        layers, head and their costs
tensor_names  names of these layers' tensors in Diffusers
linear_names  names of linears in the code of FLUX and of the Hunyuan models, which adapters have
flux_form     what FLUX and Chroma have in common in Diffusers: config.json, running a network
hunyuan_form  what the Hunyuan models have in common there: config.json, rows of ByT5
"""
