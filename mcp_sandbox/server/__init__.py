"""What the agent sees: tools, results, errors, transports. The only room that knows MCP.

server.py builds the server; tools/ holds one file per family of tools; tool.py finds the session,
checks the arguments and turns every failure into text (arguments.py, words.py, errors.py);
results.py and structured.py turn our values into MCP content, text.py keeps it short and harmless,
hints.py says what a failed command does not, pictures.py what a model can be shown; progress.py
sends live output; identity.py says which chat calls; transports.py carries the bytes.
Over HTTP (http.py, under uvicorn in peers.py) guard.py lets in or refuses each request: hosts.py,
limits.py and body.py say by what, flow.py ends what must end, older.py keeps the old sessions.
A tool decides nothing: it finds the session, makes one call and returns. This room knows no
engine, no container and no file of the host.
"""
