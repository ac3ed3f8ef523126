"""Errors of a call to a node. Apart from the client, so that `dormouse --help` need not import the client's modules."""


class Unreachable(Exception):
    """No node answers there."""


class CallRefused(Exception):
    """The node answered with an error. ``of_function``: the function did, or a job came to it."""

    def __init__(self, status: int, code: str, message: str, of_function: bool = False) -> None:
        super().__init__(message)
        self.status, self.code, self.of_function = status, code, of_function
