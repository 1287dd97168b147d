"""Whether the other program is of a version that the adapter was tested with."""

from __future__ import annotations

import importlib.metadata

from rollout_spec.errors import ConfigError, MissingExtraError


def check(package: str, least: str, below: str, extra: str) -> None:
    """Raises MissingExtraError if `package` isn't installed, ConfigError if least <= its version < below isn't so."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingExtraError(f"{package} isn't installed: pip install 'rollout-spec[{extra}]'") from error
    if not _numbers(least) <= _numbers(found) < _numbers(below):
        raise ConfigError(
            f"{package} {found} is installed, and this adapter was tested with {least} to below {below}; "
            f"pip install '{package}>={least},<{below}'"
        )


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split(".")[:3]:
        digits = "".join(character for character in part if character.isdigit())
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
