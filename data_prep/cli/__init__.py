"""The command line of data preparation.

commands         What each command does once its options are read.
media_arguments  The options of pictures and videos: what can be typed.
media_options    The options of pictures and videos: the source that follows from them.
parser           The command line: what can be typed, and how it ends.
terminal         What a person sees: progress, the summary of a run, and tables.
"""
