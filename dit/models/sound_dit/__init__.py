"""The project's own DiT for videos with sound: two streams of tokens of different widths.

family  fields, sizes, rules; inputs; layers, in which frames and sound attend to each other
names   names of weights in files of adapters, for Muon and for groups
model   the network: a row of latents and a row of sound, cross-attention to text and between them
"""
