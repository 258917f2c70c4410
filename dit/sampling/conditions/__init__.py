"""Conditions: pictures and clips at frames of a video, known sound, guidance of both streams.

clips         video files -> their pictures
files         options of generation -> latents of conditions
tokens        latents -> their effect on a pack's tokens, at the start and at each step
sound         a video and its sound as one state of a sampler; known parts of it stay unchanged
stream_scales  options for guidance of networks with sound
stream_guidance  guidance of networks with sound, with scales for each stream
stream_files  a file of known frames, and one of known sound -> their latents
"""
