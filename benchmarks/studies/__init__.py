"""Studies of methods on small digits: what they draw and train, and how they judge samples.

distilled_digits    guidance that is left after four ways of tuning a distilled network
preferred_digits    digits and inverted ones, for pairs of preferences
"""
