"""The one refusal of a file."""


class PromptCacheFileError(ValueError):
    """A file that does not hold caches, or not whole: cut, corrupted, of another kind, or not understood.

    Attributes:
        file: the file's name as it was given.
        reason: what is wrong with it.
    """

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(file, reason)
        self.file = file
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"
