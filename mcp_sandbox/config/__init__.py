"""What an operator can set, and where each value came from.

    sections       every setting with its help, one section per room
    values         kinds of values, such as `512m` or `1h30m`, and how they are checked
    sources        puts settings together and tells what is wrong
    environment    what is read from the process environment

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
from mcp_sandbox.config.sections import AgentsConfig as AgentsConfig
from mcp_sandbox.config.sections import AllowConfig as AllowConfig
from mcp_sandbox.config.sections import AuditConfig as AuditConfig
from mcp_sandbox.config.sections import BridgeConfig as BridgeConfig
from mcp_sandbox.config.sections import BridgeServerConfig as BridgeServerConfig
from mcp_sandbox.config.sections import CallsConfig as CallsConfig
from mcp_sandbox.config.sections import Config as Config
from mcp_sandbox.config.sections import ConnectorConfig as ConnectorConfig
from mcp_sandbox.config.sections import DockerConfig as DockerConfig
from mcp_sandbox.config.sections import E2BConfig as E2BConfig
from mcp_sandbox.config.sections import EgressConfig as EgressConfig
from mcp_sandbox.config.sections import FleetConfig as FleetConfig
from mcp_sandbox.config.sections import HttpConfig as HttpConfig
from mcp_sandbox.config.sections import KubernetesConfig as KubernetesConfig
from mcp_sandbox.config.sections import LimitsConfig as LimitsConfig
from mcp_sandbox.config.sections import PolicyConfig as PolicyConfig
from mcp_sandbox.config.sections import PoolConfig as PoolConfig
from mcp_sandbox.config.sections import ProjectConfig as ProjectConfig
from mcp_sandbox.config.sections import RunConfig as RunConfig
from mcp_sandbox.config.sections import SecretConfig as SecretConfig
from mcp_sandbox.config.sections import Section as Section
from mcp_sandbox.config.sections import SessionsConfig as SessionsConfig
from mcp_sandbox.config.sections import SkillsConfig as SkillsConfig
from mcp_sandbox.config.sections import StorageConfig as StorageConfig
from mcp_sandbox.config.sections import WorkspaceConfig as WorkspaceConfig
from mcp_sandbox.config.sources import LoadedConfig as LoadedConfig
from mcp_sandbox.config.sources import load_config as load_config
from mcp_sandbox.config.sources import set_value as set_value
from mcp_sandbox.config.values import Duration as Duration
from mcp_sandbox.config.values import Size as Size
