"""Sound for data preparation and generation: files -> waveforms of the same span as their frames.

tracks  a file with sound -> its track; a span of it -> samples at the rate of a codec
"""
