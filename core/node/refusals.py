"""How a call to a node fails. Apart from the client, so that `dormouse --help` need not import what calls take."""


class Unreachable(Exception):
    """No node answers there."""


class CallRefused(Exception):
    """The node answered with an error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
