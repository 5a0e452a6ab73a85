"""The files by which agents learn of this server: who reads which, and how they are changed.

    files         what each client starts, where it looks for that; writing it, and taking it back
    first_call    a first real call through what was written

Knows no daemon and no sandbox: it starts what it has written, as the client will.
"""
