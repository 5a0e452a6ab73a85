"""One process that owns the sandboxes of a data root, and the way to talk to it. Knows no MCP."""
