"""mcp-sandbox gives each chat of a coding agent its own computer that remembers its files."""
