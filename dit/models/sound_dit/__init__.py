"""The project's own DiT for videos with sound: two streams of tokens of different widths.

family  fields, sizes, rules; inputs; layers, in which frames and sound attend to each other
names   names of weights in adapter files, for Muon, and for `optimizer.groups`
model   the network: streams of latents and of sound, which attend to text and to each other
"""
