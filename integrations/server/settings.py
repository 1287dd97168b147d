"""What a server is started with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rollout_spec.errors import ConfigError

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Raises ConfigError at once for values out of range.

    model_name: what `/v1/models` says. model_path: what `/get_model_info` says.
    api_key: every request but `/health` must then carry it ("Authorization: Bearer ..."). Needed beyond loopback.
    weights_folders: folders from which weights may be loaded; with none, `/update_weights_from_disk` is refused.
    max_waiting: requests that may wait for a slot; beyond them the answer is 503.
    max_body_bytes: of a request; max_weights_bytes: of one that carries weights. Beyond them the answer is 413.
    """

    model_name: str
    model_path: str = ""
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    weights_folders: tuple[Path, ...] = ()
    max_waiting: int = 1024
    max_body_bytes: int = 16 << 20
    max_weights_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be at least {least}, got {getattr(self, name)!r}"
            for name, least in (("max_waiting", 1), ("max_body_bytes", 1024), ("max_weights_bytes", 0))
            if getattr(self, name) < least
        ]
        if not 0 <= self.port < 65536:
            faults.append(f"port must lie in 0..65535, got {self.port}")
        if self.api_key is not None and not self.api_key:
            faults.append("api_key must not be empty")
        if self.host not in _LOOPBACK and self.api_key is None:
            faults.append(f"host {self.host!r} is open to others: give an api_key, or serve on 127.0.0.1")
        faults += [
            f"weights folder {folder} is no folder" for folder in self.weights_folders if not folder.is_dir()
        ]
        if faults:
            raise ConfigError("server: " + "; ".join(faults))

    def weights_path(self, name: str) -> Path:
        """The path `name`, links resolved, if it lies in one of the folders; raises ConfigError otherwise."""
        path = Path(name).resolve()
        if not any(path.is_relative_to(folder.resolve()) for folder in self.weights_folders):
            allowed = ", ".join(map(str, self.weights_folders)) or "none (start with --weights-dir FOLDER)"
            raise ConfigError(f"weights may be loaded from below these folders: {allowed}; got {name!r}")
        return path
