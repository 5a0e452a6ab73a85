"""Where skills come from, and how they are kept. Blocking; nothing of a source is run.

fetch        one skill from a folder, an archive or a git repository
tree         all files of one skill in memory, bounded and with names that are checked
installed    put in place, replaced and taken away as a whole
"""
