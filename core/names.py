"""What functions and tenants may be called: files, cgroups and paths of URLs are made of these names."""

import re
from typing import Final

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
