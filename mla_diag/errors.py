"""Errors that end a command with one clear line: what is wrong, where, and what to do about it."""


class MlaDiagError(Exception):
    """An error for the user of the command line: printed as one line, never as a traceback.

    Attributes:
        exit_code: The status the command exits with.
    """

    exit_code = 1


class FindingError(MlaDiagError):
    """A finding that the command was told to fail on."""

    exit_code = 1


class SlowerError(MlaDiagError):
    """A comparison that the command was told to fail on."""

    exit_code = 1


class ExposedError(MlaDiagError):
    """A server that copies its KV pool, which `doctor` exits with 1 for."""

    exit_code = 1


class UsageError(MlaDiagError):
    """The command was asked for something that makes no sense."""

    exit_code = 2


class UnreadableInputError(MlaDiagError):
    """An input is missing, empty, damaged from its first byte on, or not a profiler trace."""

    exit_code = 3


class UnknownCodeError(MlaDiagError):
    """A source file is not what a rewrite of it was made for; nothing has been touched."""

    exit_code = 5


class ServerError(MlaDiagError):
    """A live server could not be reached, refused what was asked, or did not do it in time."""

    exit_code = 4


class ServerGoneError(ServerError):
    """Nothing listens at a live server's address, or no longer does, and so nothing of ours is left running there."""


class WorkersError(MlaDiagError):
    """The processes or the cluster that traces were to be explained on could not be reached, or did not do it."""

    exit_code = 4


class RefusedError(ServerError):
    """A live server refused what was asked, so that it is as it was before."""
