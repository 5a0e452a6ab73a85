"""Which chat holds which sandbox, and how long.

The way of a call: manager.py finds the chat's hold; session.py is what a caller sees of it, and the
one place where limits of a chat apply; hold.py opens the sandbox at the first call (opening.py
finds or makes it, warm.py has one ready for a new chat) and lets go of it (leaving.py). What others
may do meanwhile: chat_lock.py keeps other servers out, slots.py bounds how many are open, growth.py
holds the limits on disk, reaper.py ends what nobody uses, cleaning.py removes old files. What is
remembered: ledger.py, over the store. This room knows no MCP and no engine.
"""
