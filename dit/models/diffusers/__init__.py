"""The networks of a family as Diffusers has them.

form          config.json key by key, pipelines, and what else a family says of its class
names         which tensors of Diffusers are which of ours: kinds of rows in a table
arrangements  how ours are made of theirs
"""
