"""Print one value of a run's configuration: config_value.py FILE KEY [DEFAULT], KEY as in generation.beam."""

import sys

from omegaconf import OmegaConf

file, key, *default = sys.argv[1:]
value = OmegaConf.select(OmegaConf.load(file), key)
if value is None:
    if not default:
        sys.exit(f"{file} has no {key}")
    value = default[0]
print(value)
