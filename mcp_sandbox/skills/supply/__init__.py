"""Where skills come from, and how they are kept. Blocking; nothing of a source is run.

A source is read into a `Tree`: all files of one skill in memory, bounded and with names that are
checked, before anything is written. What has been agreed to is put in place as a whole.
"""
