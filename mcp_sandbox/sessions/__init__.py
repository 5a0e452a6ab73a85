"""Which chat holds which sandbox, and how long.

The way of a call: manager.py finds the chat's hold; session.py is what a caller sees of it; gate.py
is the only way in, where every call is narrowed, given its limits and recorded; hold.py opens the
sandbox at the first call and lets go of it (ways.py finds, makes and ends it, warm.py has one
ready for a new chat). What others may do meanwhile: records.py remembers each chat and keeps other
servers out, slots.py bounds how many are open, rooms.py holds what is open to its limits on disk,
cleaning.py ends what nobody uses and removes old files. previews.py lets a person's browser in to
a port of a sandbox. This room knows no MCP and no engine.
"""
