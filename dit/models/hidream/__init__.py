"""HiDream-I1, with the arithmetic of Diffusers' `HiDreamImageTransformer2DModel`.

family        fields, sizes, rules; inputs; layers, from which parameters and operations follow
model         the network: double-stream layers, then sequential ones, with experts
experts       mixture of experts: feed-forwards weighted by a router for each token
layer_text    text whose states differ from layer to layer: one hidden state of Llama for each
diffusers     names of tensors, config.json, pipelines, calls of Diffusers' network
expert_names  names of the tensors of the layers
"""
