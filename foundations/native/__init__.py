"""C++ of our own: compiled once with the system's compiler, kept where nobody else may write, loaded with ctypes."""

from retime.foundations.native.library import NoLibraryError, Source

__all__ = [
    "NoLibraryError",
    "Source",
]
