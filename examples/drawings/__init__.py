"""Drawings with captions: pictures to train on.

coloured_shapes  shapes of two sizes on white, and a program that judges samples
emoji_pictures   the emoji of Noto Color Emoji
"""
