"""C++ of our own: compiled once with the system's compiler, kept where nobody else may write, loaded with ctypes."""
