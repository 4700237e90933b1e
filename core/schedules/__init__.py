"""Pipeline schedules: builders, the lowering pass, CSV."""

from .catalog import CATALOG, build, default_name, schedule_for
from .csv import from_csv, read_csv, to_csv
from .lower import lower

__all__ = ["CATALOG", "build", "default_name", "from_csv", "lower", "read_csv", "schedule_for", "to_csv"]
