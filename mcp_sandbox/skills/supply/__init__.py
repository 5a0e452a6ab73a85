"""Where skills come from, and how they are kept.

A source (a folder, a git repository, an archive) is read into a `Tree`: all files of one skill in
memory, bounded and with names that are checked, before anything is written. What has been agreed
to is written beside its place and renamed into it, so that no reader ever sees half of a skill.

Everything here blocks; it is for the command line and for threads. Nothing of a source is run.
"""
