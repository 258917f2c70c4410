"""Handwritten digits: the program of recipes/evaluate_digits.py, and studies of methods.

accuracy          the part of generated digits that show the digit of their prompt
kinds             kinds of digits: their prompts, how results are judged, what is demanded
likeness          spread and distance of sets, which reading single digits does not show
judges            classifiers of real digits and clips, nearest digits, counts
distilled_digits  how much guidance is left after four ways of tuning a distilled network
mlperf_twin       training methods at equal CPU seconds, on a small version of MLPerf's FLUX.1
drawn_latents     a small run whose latents are means, drawn once, or drawn anew
tones             tones of moving digits: pitch and loudness, made and read
sounding_digits   moving digits with a tone: packed, and read from what a run generates
preferred_digits  digits and inverted ones, for pairs of preferences
"""
