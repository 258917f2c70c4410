"""Finds the media of folders, archives and datasets with their captions, and plans samples.

dataset_file    several folders with settings of their own, from a YAML or TOML file
listing         files below a folder: media, caption files, tables, archives, others
archives        members of a tar archive, found by its headers
table_rows      bytes of a caption table -> its rows
caption_tables  all tables of a folder -> the captions of a medium
beside_media    control pictures of edits and rejected partners -> pixels
loss_masks      loss masks -> weights of latent cells
folders         media of a folder, with their captions
huggingface     media of a Hugging Face dataset, with their captions
media_source    probes each medium and plans its samples; reads their pixels when they are packed
media_notes     notes on media that are packed, such as a variable frame rate
digits          the handwritten digits of scikit-learn, still, moving or edited
"""
