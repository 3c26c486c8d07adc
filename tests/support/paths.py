"""Where the scripts lie that tests run in processes of their own, and what those need to import from here."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
PYTHONPATH = {"PYTHONPATH": str(TESTS)}
