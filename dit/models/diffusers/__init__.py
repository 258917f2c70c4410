"""Types that describe Diffusers' counterpart of a family's networks.

form          config.json key by key, pipelines, and other facts about a class of Diffusers
names         the table of names: Diffusers' tensors for each of our tensors
arrangements  how our tensors are computed from Diffusers'
"""
