"""What an operator can set, and where each value came from.

Defaults lie under a YAML file, the file under `MCP_SANDBOX_*` environment variables (sections
joined by two underscores), and these under command-line flags. This room is the only reader of
the process environment. Another room gets its own section, never the whole `Config`.
"""

from mcp_sandbox.config.environment import docker_variables as docker_variables
from mcp_sandbox.config.environment import git_variables as git_variables
from mcp_sandbox.config.environment import home as home
from mcp_sandbox.config.environment import own_folders as own_folders
from mcp_sandbox.config.environment import proxy_variables as proxy_variables
from mcp_sandbox.config.environment import search_path as search_path
from mcp_sandbox.config.environment import server_variables as server_variables
from mcp_sandbox.config.models import AgentsConfig as AgentsConfig
from mcp_sandbox.config.models import AllowConfig as AllowConfig
from mcp_sandbox.config.models import AuditConfig as AuditConfig
from mcp_sandbox.config.models import BridgeConfig as BridgeConfig
from mcp_sandbox.config.models import BridgeProcessConfig as BridgeProcessConfig
from mcp_sandbox.config.models import BridgeServerConfig as BridgeServerConfig
from mcp_sandbox.config.models import CallsConfig as CallsConfig
from mcp_sandbox.config.models import Config as Config
from mcp_sandbox.config.models import ConnectorConfig as ConnectorConfig
from mcp_sandbox.config.models import DockerConfig as DockerConfig
from mcp_sandbox.config.models import Duration as Duration
from mcp_sandbox.config.models import EgressConfig as EgressConfig
from mcp_sandbox.config.models import HttpConfig as HttpConfig
from mcp_sandbox.config.models import LimitsConfig as LimitsConfig
from mcp_sandbox.config.models import PolicyConfig as PolicyConfig
from mcp_sandbox.config.models import PoolConfig as PoolConfig
from mcp_sandbox.config.models import ProjectConfig as ProjectConfig
from mcp_sandbox.config.models import RunConfig as RunConfig
from mcp_sandbox.config.models import SecretConfig as SecretConfig
from mcp_sandbox.config.models import Section as Section
from mcp_sandbox.config.models import SessionsConfig as SessionsConfig
from mcp_sandbox.config.models import Size as Size
from mcp_sandbox.config.models import SkillsConfig as SkillsConfig
from mcp_sandbox.config.models import WorkspaceConfig as WorkspaceConfig
from mcp_sandbox.config.sources import Loaded as Loaded
from mcp_sandbox.config.sources import load_config as load_config
