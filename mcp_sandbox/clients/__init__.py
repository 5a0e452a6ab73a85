"""Adds this server to the settings of agents' clients, and removes it again.

    files      each client's file and entry; writing it, and taking it back
    check      a first real call through the entry that was written

Knows no daemon and no sandbox: it starts the entry as the client will.
"""
