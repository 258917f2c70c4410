"""Pictures and clips that a video shows from frames of its own on.

clips   files of videos -> their pictures
files   options of generation -> their latents
tokens  latents -> what the tokens of a pack get from them, at the start and at each step
"""
