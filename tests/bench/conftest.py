"""`planted` can be imported by name, as a user's module can."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
