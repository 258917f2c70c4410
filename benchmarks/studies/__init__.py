"""What a study draws, and how it judges samples.

preferred_digits    digits and inverted ones, for pairs of preferences
"""
