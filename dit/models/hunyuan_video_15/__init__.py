"""HunyuanVideo 1.5, as Diffusers' `HunyuanVideo15Transformer3DModel` computes it.

family          the entry of the registry; the layers, from which parameters and operations follow
config          the family's own fields, named sizes and rules
conditions      text, words in quotation marks and picture -> one row of text; the token refiner
model           the network: double-stream layers alone
diffusers       names of tensors, config.json and pipelines
"""
