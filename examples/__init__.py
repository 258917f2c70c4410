"""Small problems to train on in a checkout, and judges of what is generated; not in the wheel.

digits    handwritten digits, still, moving and edited: their judge, studies of methods
drawings  coloured shapes with their judge, emoji
"""
