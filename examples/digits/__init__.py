"""Handwritten digits: the program of recipes/evaluate_digits.py, and studies of methods.

accuracy          the fraction of generated digits that show the requested digit
kinds             kinds of digits: their prompts, and how many must be right
likeness          spread and distance of sets of digits, which classifiers do not see
judges            what digits show: classifiers of real digits and clips, nearest digits, counts
study             programs that a study starts, once each
distilled_digits  guidance that is left after four ways of tuning a distilled network
few_steps         students of few steps beside their teacher, and what tuning leaves of them
mlperf_twin       training methods at equal CPU seconds, on MLPerf's FLUX.1 cut small
drawn_latents     a small run whose latents are means, drawn once, or drawn anew
tones             tones of moving digits: pitch and loudness, made and read
sounding_digits   moving digits with a tone: packed, and read from what a run generates
preferred_digits  digits and inverted ones, for pairs of preferences
"""
