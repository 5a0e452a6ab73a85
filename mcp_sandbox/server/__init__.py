"""What the agent sees: tools, results, errors, transports. The only room that knows MCP.

server.py builds the server; tools/ holds one file per family of tools; tool.py finds the session,
checks the arguments and turns every failure into text (errors.py); results.py turns our values into
MCP content, text.py keeps it short and harmless; identity.py says which chat calls; transports.py
carries the bytes.
Over HTTP (http.py, under uvicorn) guard.py lets in or refuses each request; flow.py says how much
one user may ask, and ends what must end.
A tool decides nothing: it finds the session, makes one call and returns. This room knows no
engine, no container and no file of the host.
"""
