"""What bundled scripts use, found by reading them: imports, commands, hosts, variables."""
