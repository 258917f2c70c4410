"""What a run would take on other machines: memory, communication and time, by arithmetic alone.

devices    table of devices, and how much of their peak software reaches
traffic    bytes that ranks send each other in a step
times      seconds of a step, from operations, bytes and the table
layouts    every layout of so many devices, best first, and why others do not work
tables     plans as tables on the terminal, and as JSON
"""
