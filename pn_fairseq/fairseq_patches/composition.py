"""hydra composes the settings of a run without a copy of the settings of all components.

It makes this copy for every composition, which takes a third of the time. What it reads from its
store it copies as well.
"""

from hydra.core.config_store import ConfigStore

ConfigStore.__deepcopy__ = lambda store, _: store
