"""Conditions: pictures and clips that are given at certain frames of a video.

clips         video files -> their pictures
files         options of generation -> latents of conditions
tokens        latents -> their effect on a pack's tokens, at the start and at each step
sound         a video and its sound as one state of a sampler, and what of both is given
stream_files  files of given frames and of given sound -> what is given
"""
