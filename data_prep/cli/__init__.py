"""The command line of data preparation.

parser           the commands and their options; exit codes and error messages
media_arguments  the options of pictures and videos: types, defaults, help texts
media_options    options -> the source that they describe; warnings about options without effect
commands         what each command does
inspection       the command that reads a dataset back
next_command     what to do with a dataset: the command that trains on it
terminal         output: summaries and tables
"""
