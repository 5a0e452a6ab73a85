"""The files by which agents learn of this server: who reads which, and how they are changed.

    entry      what a client shall start, and where it looks for that
    claude, cursor, vscode, inspector: one entry each, in the client's own format
    document   JSON text changed at one place, everything else byte by byte as it was
    change     what will be written, as a diff; writing it whole or not at all; taking it back
    record     what a file was before us
    check      a first real call through what was written

Knows no daemon and no sandbox: it starts what it has written, as the client will.
"""
