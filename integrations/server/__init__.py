"""An HTTP server for trainers that speak SGLang's or OpenAI's endpoints: `rollout-spec serve`."""

from rollout_spec.integrations.server.app import create_app
from rollout_spec.integrations.server.host import EngineHost
from rollout_spec.integrations.server.settings import ServerSettings

__all__ = ["EngineHost", "ServerSettings", "create_app"]
