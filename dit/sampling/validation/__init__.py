"""Pictures and their quality while a run trains.

feature_extractor  Features of pictures and captions, from a network that the user names.
fid_clip           Distances between generated and real pictures, as sets of features. Pure torc
requests           What is sampled at each validation, and what for: found once, before training
samples            What a run samples at each validation: prompts of a file, captions of held-ou
"""
