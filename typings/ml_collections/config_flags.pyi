"""What this project uses of ml_collections.config_flags."""

from typing import Any

from absl.flags import Flag, FlagHolder

from ml_collections import ConfigDict

def DEFINE_config_file(name: str, default: str | None = None, help_string: str = ..., *, lock_config: bool = ...,
                       **kwargs: Any) -> FlagHolder[ConfigDict]: ...
def get_config_filename(config_flag: Flag[Any]) -> str: ...
def get_override_values(config_flag: Flag[Any]) -> dict[str, Any]: ...
