"""The user who runs this process."""

import os
import pwd


def user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a uid needs no entry
        return str(os.getuid())
