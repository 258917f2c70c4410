"""Pictures and clips that are shown at given frames of a video.

clips   files of videos -> their pictures
files   options of generation -> their latents
tokens  latents -> their effect on a pack's tokens, at the start and at each step
sound   a video and its sound as one state of a sampler, and what of both is given
"""
