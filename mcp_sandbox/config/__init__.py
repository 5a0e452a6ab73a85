"""What an operator can set, and where each value came from.

Defaults lie under a YAML file, the file under `MCP_SANDBOX_*` environment variables (sections
joined by two underscores), and these under command-line flags. This room is the only reader of
the process environment. Another room gets its own section, never the whole `Config`.
"""

from mcp_sandbox.config.environment import (
    docker_variables,
    git_variables,
    home,
    own_folders,
    proxy_variables,
    search_path,
    server_variables,
)
from mcp_sandbox.config.models import (
    CallsConfig,
    Config,
    DockerConfig,
    HttpConfig,
    LimitsConfig,
    PoolConfig,
    ProjectConfig,
    SessionsConfig,
    SkillsConfig,
    WorkspaceConfig,
)
from mcp_sandbox.config.sources import Loaded, load_config

__all__ = [
    "CallsConfig",
    "Config",
    "DockerConfig",
    "HttpConfig",
    "LimitsConfig",
    "Loaded",
    "PoolConfig",
    "ProjectConfig",
    "SessionsConfig",
    "SkillsConfig",
    "WorkspaceConfig",
    "docker_variables",
    "git_variables",
    "home",
    "load_config",
    "own_folders",
    "proxy_variables",
    "search_path",
    "server_variables",
]
