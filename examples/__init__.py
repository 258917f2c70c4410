"""Small problems to train on in a checkout, and programs that judge what is generated.

They are not in the wheel.

digits    handwritten digits, still, moving and edited: their judge, studies of methods
drawings  coloured shapes with their judge, emoji
"""
