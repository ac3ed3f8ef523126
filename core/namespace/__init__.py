"""The package ``dormouse`` itself: its version. The folders at the top of the repository are its subpackages."""


def __getattr__(name: str) -> str:
    if name == "__version__":  # looked up when somebody asks: reading metadata takes longer than most imports here
        from importlib.metadata import version

        return version("dormouse")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
