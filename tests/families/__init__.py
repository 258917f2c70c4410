"""The families in Diffusers, tiny and random: what the contracts of tests/contract ask of each.

case             what a family brings: its class, configurations, how Diffusers calls it
encoding         codecs and text encoders on a folder, as the command line opens them
table            the cases of all families
dit ... chroma   a family each, with folders of its pipelines where Diffusers has some
generation       our generation from the noise that a pipeline has
pipeline_parts   text encoders, tokenizers, VAEs of pipelines
"""
