"""No process waits for ever for another that has died.

monitor  No process waits for ever for another: signs of life, and a verdict that names a rank.
verdict  Reports of all processes -> who has died, or holds up the others. Pure: no store, no cl
"""
